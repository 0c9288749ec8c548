#!/bin/bash
# guest.sh - the machine's network and its command; runs once, in the root file system, after init.sh. See machine.py for the parameters.
#
# A rail is a pair of virtual Ethernet devices near<i> 10.77.<i>.1 and far<i>n 10.77.<i>.2. Both ends are this machine's, and the kernel
# would deliver between its own addresses without a wire. With FAR=1 routes by outgoing interface send what is bound to one end (as
# Soft-RoCE's packets are) over the pair, so that loss, delay and a link that is down act on them; other traffic stays local.
#
# The kernel forgets the routes of an end that went down: /run/vm/rail<I> has what restores rail I, for `ip -batch`.
cd /run/vm && . ./setting
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8

must() { "$@" || { echo "guest: failed: $*"; echo "status 125" >/dev/vport0p2; exit; }; }

rail() {
    must ip link add near$1 mtu 4400 type veth peer name far$1n mtu 4400
    must ip addr add 10.77.$1.1/24 dev near$1
    must ip addr add 10.77.$1.2/24 dev far$1n
    must ip link set near$1 up
    must ip link set far$1n up
    must rdma link add rxe$1 type rxe netdev near$1
}

# one_way I TABLE FROM TO ADDRESS: packets for ADDRESS that leave through FROM go out on it, to the device TO.
one_way() {
    cat >>/run/vm/rail"$1" <<END
link set $3 up
route replace $5 dev $3 table $2
neigh replace $5 lladdr $(cat /sys/class/net/"$4"/address) dev $3 nud permanent
END
    must ip rule add pref 10 oif "$3" to "$5" lookup "$2"
    sysctl -qw net.ipv4.conf."$3".accept_local=1
}

exec </dev/null >/dev/vport0p1 2>&1
ulimit -l unlimited
ulimit -n 65536
sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0
ip link set lo up
if [ "$RAILS" -gt 0 ] && [ "$FAR" = 1 ]; then # after the rules by interface, before everything else
    must ip rule add pref 20 lookup local
    must ip rule del pref 0
fi
for ((i = 0; i < RAILS; i++)); do
    rail $i
    [ "$FAR" = 1 ] || continue
    one_way $i $((100 + 2 * i)) near$i far${i}n 10.77.$i.2
    one_way $i $((101 + 2 * i)) far${i}n near$i 10.77.$i.1
    must ip -batch /run/vm/rail$i
    must rdma link add far$i type rxe netdev far${i}n
done
if [ "$WIRE_HOST" != 0 ]; then
    must ip link set eth0 mtu 4400
    must ip addr add 10.78.0."$WIRE_HOST"/24 dev eth0
    must ip link set eth0 up
    must rdma link add rxe_w type rxe netdev eth0
fi

cd "${WORK:-/}" || cd /
/run/vm/command
status=$?
sync
echo "status $status" >/dev/vport0p2
