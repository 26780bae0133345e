#!/usr/bin/env bash
# Sets up the environments of other projects that benchmarks and interoperability tests run beside ours, one each.
#
#     bash benchmarks/peers/setup.sh [NAME...]      dyn vllm vllmr; all of them without arguments
#
# They live under $PEERS and nothing of ours imports them. One that is complete is left as it is.
set -euo pipefail

PEERS="${PEERS:-$HOME/.cache/kvmesh-peers}"
PYTHON="${PYTHON:-python3}"
PIP="-m pip --quiet --disable-pip-version-check"

mkdir -p "$PEERS"
cd "$PEERS"

environment() { # NAME STEP...: a virtual environment, made anew unless its last step was reached before
	local name=$1
	shift
	[ -e "$name/.complete" ] && return
	echo "setting up $PEERS/$name"
	"$PYTHON" -m venv "$name"
	"$@"
	touch "$name/.complete"
}

dyn() { # Dynamo: its radix tree, its indexer and its decoder of events
	dyn/bin/python $PIP install ai-dynamo-runtime==1.6.1 numpy xxhash blake3 msgspec pyzmq psutil aiohttp prometheus-client
	dyn/bin/python $PIP install --no-deps ai-dynamo==1.6.1
}

vllm() { # vLLM: only what runs without torch, from the unpacked Python files of its wheel
	vllm_env/bin/python $PIP install msgspec numpy pyzmq cbor2 xxhash
	vllm_env/bin/python $PIP download --no-deps --dest vllm_wheel vllm==0.33.0
	mkdir -p vllm_src
	vllm_env/bin/python -c '
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall("vllm_src", [name for name in wheel.namelist() if name.endswith(".py")])' vllm_wheel/vllm-*.whl
	rm -r vllm_wheel
}

vllmr() { # vLLM's router
	vllmr/bin/python $PIP install vllm-router==0.1.17
}

for name in "${@:-dyn vllm vllmr}"; do
	for each in $name; do
		case $each in
		dyn) environment dyn dyn ;;
		vllm) environment vllm_env vllm ;;
		vllmr) environment vllmr vllmr ;;
		*)
			echo "unknown peer: $each" >&2
			exit 2
			;;
		esac
	done
done
