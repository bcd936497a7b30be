#!/usr/bin/env bash
# Compare steps and final bits of shardcast's algorithms with DDP and ZeroRedundancyOptimizer on two
# hosts, which are network namespaces with two processes each. Their link has 200 Mbit/s, then
# 1 Gbit/s. Needs root, iproute2 and Linux, else it is skipped. Ten minutes on two cores.
#
# Usage: bash tools/two_hosts.sh [--rounds N]
# Environment: VENV, PYTHON (see environment.sh); RATES (default: "200mbit 1gbit"); RANKS per host
# (default: 2)
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ $(uname) != Linux || $(id -u) != 0 ]]; then
    echo "skipped: network namespaces need Linux and root"
    exit 0
fi
if ! command -v ip >/dev/null || ! command -v tc >/dev/null; then
    echo "skipped: ip and tc are missing; the package iproute2 has them"
    exit 0
fi
if ! ip netns add shardcast-try 2>/dev/null; then
    echo "skipped: this root may not make network namespaces"
    exit 0
fi
ip netns del shardcast-try
source launch/environment.sh
environment plot
export PYTHONPATH=$PWD/launch:$PYTHONPATH OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=wire
export TORCH_CPP_LOG_LEVEL=ERROR # else it warns that the hosts have no names

work=$(mktemp -d)
clean_up() {
    for host in 0 1; do
        ip netns pids "shardcast-$host" 2>/dev/null | xargs --no-run-if-empty kill || true
        ip netns del "shardcast-$host" 2>/dev/null || true
    done
    rm -rf "$work"
}
trap clean_up EXIT

for host in 0 1; do
    ip netns add "shardcast-$host"
    # shardcast identifies a machine by its boot_id, so each host needs its own.
    echo "two-hosts-$host" >"$work/boot_id-$host"
done
ip link add name wire netns shardcast-0 type veth peer name wire netns shardcast-1
for host in 0 1; do
    inside=(ip netns exec "shardcast-$host")
    "${inside[@]}" sysctl --quiet --write net.ipv6.conf.all.disable_ipv6=1 || true
    "${inside[@]}" ip link set lo up
    "${inside[@]}" ip address add "10.77.0.$((host + 1))/24" dev wire
    "${inside[@]}" ip link set wire up
done

# Starts the ranks of one host, with its own boot_id.
start() {
    local host=$1
    shift
    ip netns exec "shardcast-$host" bash -c '
        mount --bind "$1" /proc/sys/kernel/random/boot_id
        shift
        exec "$@"' bash "$work/boot_id-$host" \
        "$python" -m torch.distributed.run --nnodes=2 --nproc-per-node="${RANKS:-2}" \
        --rdzv-backend=c10d --rdzv-endpoint=10.77.0.1:29400 --rdzv-id=two-hosts \
        --rdzv-conf="is_host=$((1 - host))" \
        --local-addr="10.77.0.$((host + 1))" -m benchmarks.two_hosts "$@"
}

for rate in ${RATES:-200mbit 1gbit}; do
    for host in 0 1; do
        ip netns exec "shardcast-$host" \
            tc qdisc replace dev wire root tbf rate "$rate" burst 64kb limit 64mb
    done
    start 1 --title "$rate" "$@" &
    start 0 --title "$rate between two hosts of ${RANKS:-2} ranks" "$@"
    wait
done
