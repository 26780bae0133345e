#!/usr/bin/env bash
# A stand-in for the official python:3.11-slim-bookworm image where no registry can be reached: Debian's own packages,
# with what the official image has (Python, pip, Python's headers, CA certificates) and little else.
#   base-image.sh OUT.tar     (root; needs mmdebstrap)
set -euo pipefail
out=$1
sources=/etc/apt/sources.list.d/debian.sources
[ -e "$sources" ] || sources=/etc/apt/sources.list
hook=$(mktemp)
trap 'rm -f "$hook" "$out.partial"' EXIT
cat >"$hook" <<'HOOK'
#!/bin/sh
set -eu
root=$1
# The headers of python3-dev without its static libraries, and pip without what Debian's package of it brings along.
chroot "$root" sh -euc 'cd /tmp
    apt-get download -qq libpython3.11-dev python3-pip-whl
    for deb in *.deb; do dpkg -x "$deb" files; done
    cp -a files/usr/include/. /usr/include/
    python3 -m zipfile -e files/usr/share/python-wheels/pip-*.whl /usr/local/lib/python3.11/dist-packages
    rm -rf /tmp/*'
printf '#!/bin/sh\nexec python3 -m pip "$@"\n' >"$root/usr/local/bin/pip"
chmod +x "$root/usr/local/bin/pip"
rm -f "$root"/usr/lib/python3.*/EXTERNALLY-MANAGED
for name in python python3; do ln -sf /usr/bin/python3.11 "$root/usr/local/bin/$name"; done
rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/* "$root"/var/cache/debconf/*-old "$root"/var/log/*
find "$root/usr/lib/python3.11" -name test -type d -prune -exec rm -rf {} +
HOOK
chmod +x "$hook"
mmdebstrap --mode=root --variant=minbase --quiet --format=tar \
    --include=ca-certificates,python3,usr-is-merged --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
    --aptopt='APT::Install-Recommends "false"' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/info/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --customize-hook="$hook" \
    bookworm "$out.partial" "$sources"
mv "$out.partial" "$out"
