#!/usr/bin/env bash
# Compose v2 and buildx where the distribution has neither: trixie's packages hold plain binaries, and apt fetches them
# with a state of its own, so that this system's package lists stay as they are.
#   compose-plugin.sh DOCKER_CONFIG_DIR
set -euo pipefail
config=$1
[ -x "$config/cli-plugins/docker-compose" ] && [ -x "$config/cli-plugins/docker-buildx" ] && exit 0
apt=$(mktemp -d)
trap 'rm -rf "$apt"' EXIT
mkdir -p "$apt"/{lists/partial,cache/archives/partial,etc,debs}
sed 's/bookworm/trixie/g' /etc/apt/sources.list.d/debian.sources >"$apt/etc/debian.sources"
: >"$apt/status"
options=(-qq -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$apt/etc" -o Dir::State::lists="$apt/lists"
    -o Dir::Cache="$apt/cache" -o Dir::State::status="$apt/status" -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
(cd "$apt/debs" && apt-get "${options[@]}" download docker-compose docker-buildx)
for deb in "$apt"/debs/*.deb; do dpkg -x "$deb" "$apt/files"; done
mkdir -p "$config/cli-plugins"
cp "$apt"/files/usr/libexec/docker/cli-plugins/docker-{compose,buildx} "$config/cli-plugins/"
