#!/usr/bin/env bash
# A Docker engine of one's own, without systemd and without a change to this machine's netfilter rules and sysctls.
#   engine.sh start STATE_DIR    prints DOCKER_HOST
#   engine.sh stop STATE_DIR
set -euo pipefail
action=$1 state=$2
mkdir -p "$state"
pidfile=$state/dockerd.pid
case $action in
start)
    # Without --iptables containers of a network reach each other and published ports work, but nothing outside.
    setsid dockerd --data-root "$state/data" --exec-root "$state/exec" --pidfile "$pidfile" \
        --host "unix://$state/docker.sock" --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false \
        >"$state/dockerd.log" 2>&1 </dev/null &
    launched=$!
    for _ in $(seq 1 300); do
        if curl -sf --unix-socket "$state/docker.sock" http://docker/_ping >/dev/null; then
            echo "unix://$state/docker.sock"
            exit 0
        fi
        kill -0 "$launched" 2>/dev/null || break
        sleep 0.2
    done
    tail -20 "$state/dockerd.log" >&2
    exit 1
    ;;
stop)
    [ -f "$pidfile" ] || exit 0
    pid=$(cat "$pidfile")
    kill "$pid" 2>/dev/null || exit 0
    for _ in $(seq 1 300); do kill -0 "$pid" 2>/dev/null || break; sleep 0.2; done
    ip link delete docker0 2>/dev/null || true
    ;;
esac
