#!/usr/bin/env bash
# Builds a Kubernetes control plane, kubelet and kube-proxy (1.20.2) from Debian 12's source package, without a Go proxy,
# for the tests of the chart. Needs golang-1.19-go.
#
# usage: build-kubernetes.sh BIN_DIR [WORK_DIR]     WORK_DIR defaults to BIN_DIR/../kubernetes-build and may be removed
set -euo pipefail

bin=$(mkdir -p "$1" && realpath "$1")
work=${2:-$bin/../kubernetes-build}
version=1.20.2
mkdir -p "$work"
cd "$work"

missing=()
[ -x /usr/lib/go-1.19/bin/go ] || missing+=(golang-1.19-go)
if [ ${#missing[@]} -gt 0 ]; then
    echo "missing: ${missing[*]}; install with: sudo apt-get install -y --no-install-recommends ${missing[*]}" >&2
    exit 1
fi

# The source package comes with apt, from a state of its own: the system's lists stay as they are.
if [ ! -d "kubernetes-$version" ]; then
    apt=$work/apt
    mkdir -p "$apt"/lists/partial "$apt"/cache/archives/partial "$apt"/sources
    : >"$apt/status"
    sed 's/^Types: deb$/Types: deb-src/' /etc/apt/sources.list.d/debian.sources >"$apt/sources/debian.sources"
    options=(-o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$apt/sources"
        -o Dir::State::lists="$apt/lists" -o Dir::Cache="$apt/cache" -o Dir::State::status="$apt/status")
    apt-get "${options[@]}" -qq update
    apt-get "${options[@]}" -qq source --download-only kubernetes
    tar xzf kubernetes_*.orig.tar.gz
fi

cd "kubernetes-$version"
export PATH=/usr/lib/go-1.19/bin:$PATH GOROOT=/usr/lib/go-1.19 GO111MODULE=off CGO_ENABLED=0
export GOPATH=$work/go GOCACHE=$work/go-cache
project=$GOPATH/src/k8s.io/kubernetes
mkdir -p "$GOPATH/src/k8s.io"
ln -sfn "$PWD" "$project"
cd "$project"

# Of everything that is generated, only the OpenAPI definitions of the API server are not in the package.
if [ ! -s pkg/generated/openapi/zz_generated.openapi.go ]; then
    inputs=$(grep -rl --include='*.go' '^// +k8s:openapi-gen=' pkg vendor/k8s.io/*/ 2>/dev/null |
        grep -v -e '^vendor/k8s.io/code-generator/' -e '^vendor/k8s.io/sample-apiserver/' -e /testdata/ |
        xargs -n 1 dirname | LC_ALL=C sort -u | sed 's|^|k8s.io/kubernetes/|' | paste -sd ,)
    go run ./vendor/k8s.io/kube-openapi/cmd/openapi-gen --logtostderr -i "$inputs" \
        -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
        -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$work/api_violations.txt"
fi

package=k8s.io/kubernetes/vendor/k8s.io/component-base/version
client=k8s.io/kubernetes/vendor/k8s.io/client-go/pkg/version
flags="-s -w"
for name in $package $client; do
    flags+=" -X $name.gitVersion=v$version -X $name.gitMajor=1 -X $name.gitMinor=20"
done
for name in kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy; do
    go build -tags selinux,notest -ldflags "$flags" -o "$bin/$name" "k8s.io/kubernetes/cmd/$name"
done
ls -l "$bin"
