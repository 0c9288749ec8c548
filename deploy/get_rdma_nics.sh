#!/bin/bash
# get_rdma_nics.sh - prints the environment variable that names the RDMA devices near the GPUs, or
# the network interface of the host's own traffic. `baton nics` is this script.
#
# usage: export $(bash get_rdma_nics.sh gpu)     prints  KVCACHE_RDMA_NICS=mlx5_0,mlx5_1,...
#        export $(bash get_rdma_nics.sh cpu)     prints  KV_CACHE_SOCKET_IFNAME=bond0
# Exactly that one line goes to stdout. When there is nothing to name, the line has no value, which
# baton reads as not set, a sentence on stderr says why, and the status is not 0 (1: this host has
# no such device; 2: wrong usage). An `export` without any word would print the environment.
#
# gpu  The i-th name suits the i-th GPU in PCI order (users take list[i mod n]). It is the device
#      with an active port that shares the deepest PCIe bridge with the GPU; without a common bridge
#      one on its NUMA node; without that any. Among equals the fastest wins, then the least used,
#      then the first by name. Names repeat where GPUs share a device, and a list that repeats
#      itself is cut to its period. Devices that share a bridge with a GPU but are no GPU's choice
#      come last. At most 8 different names. A virtual function is left out when its physical
#      function is on this host.
# cpu  The first bond that is up and has an IPv4 address, else the first such hardware interface
#      that shares no bridge with a GPU, else the first such bridge or VLAN on top of hardware.
#
# Environment: SYSFS_ROOT (/sys); IP_ADDR_FILE (a file with the output of `ip -o -4 addr`);
# BATON_RDMA_SOFTWARE=1: gpu also names emulated devices (rdma_rxe, siw), after all others, and
# needs no GPU; for tests without hardware.
set -euo pipefail
export LC_ALL=C
sys=${SYSFS_ROOT:-/sys}
software=${BATON_RDMA_SOFTWARE:-0}
max_devices=8

name=${0##*/}
variable=KVCACHE_RDMA_NICS
[[ ${1:-} != *cpu* ]] || variable=KV_CACHE_SOCKET_IFNAME

fail() { echo "$variable="; echo "$name: $2" >&2; exit "$1"; }

# first_line FILE: its first line, or nothing.
first_line() { local text=; { IFS= read -r text <"$1"; } 2>/dev/null || true; printf '%s' "$text"; }

# pci_path DIR: the PCI functions from the host bridge's child down to DIR's device,
# "0000:15:01.0 0000:16:00.0"; nothing when DIR is not below a PCI device.
pci_path() {
    local real part out=
    real=$(readlink -f "$1") || return 0
    for part in ${real//\// }; do
        [[ $part =~ ^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$ ]] && out+="${out:+ }$part"
    done
    printf '%s' "$out"
}

# n_shared A B: how many bridges two paths have in common (their own last function does not count).
n_shared() {
    local a=($1) b=($2) n=0
    while [ $n -lt $((${#a[@]} - 1)) ] && [ $n -lt $((${#b[@]} - 1)) ] &&
        [ "${a[n]}" = "${b[n]}" ]; do n=$((n + 1)); done
    echo $n
}

# Finds the GPUs in PCI order: NVIDIA's, else AMD's, else others'. Display controllers of other
# vendors (class 0300, e.g. a board's management controller) are no GPUs. Accelerators without a
# monitor port have the classes 0380 and 1200.
gpu_paths=() gpu_nodes=()
find_gpus() {
    local vendor dir class found=() maker
    for vendor in 0x10de 0x1002 other; do
        for dir in "$sys"/bus/pci/devices/*; do
            class=$(first_line "$dir/class") maker=$(first_line "$dir/vendor")
            case $vendor:$maker:$class in
            0x10de:0x10de:0x030[02]*) ;;
            0x1002:0x1002:0x030[02]* | 0x1002:0x1002:0x0380* | 0x1002:0x1002:0x1200*) ;;
            other:0x10de:* | other:0x1002:*) continue ;;
            other:*:0x0302* | other:*:0x0380* | other:*:0x1200*) ;;
            *) continue ;;
            esac
            [ -e "$dir/physfn" ] || found+=("$dir")
        done
        [ ${#found[@]} = 0 ] || break
    done
    for dir in "${found[@]}"; do # names of fixed width: the glob's order is PCI order
        gpu_paths+=("$(pci_path "$dir")")
        gpu_nodes+=("$(first_line "$dir/numa_node")")
    done
}

# rate_of DEVICE: Mbit/s of its fastest active port; nothing when none is active.
rate_of() {
    local port best= rate
    for port in "$1"/ports/*; do
        [[ $(first_line "$port/state") == *ACTIVE* ]] || continue
        rate=$(first_line "$port/rate") # "400 Gb/sec (4X NDR)", "2.5 Gb/sec (1X SDR)"
        rate=$(awk '{ printf "%d", $1 * 1000 }' <<<"$rate")
        [ -n "$best" ] && [ "$best" -ge "$rate" ] || best=$rate
    done
    printf '%s' "$best"
}

# RDMA devices with an active port: parallel lists.
nic_names=() nic_paths=() nic_nodes=() nic_rates=() nic_uses=() idle=() emulated=()
find_nics() {
    local names name dir rate path
    names=$(ls "$sys/class/infiniband" 2>/dev/null | sort -V) || names=
    for name in $names; do
        dir=$sys/class/infiniband/$name
        rate=$(rate_of "$dir")
        if [ -z "$rate" ]; then idle+=("$name"); continue; fi
        path=
        [ ! -e "$dir/device" ] || path=$(pci_path "$dir/device")
        if [ -z "$path" ] && [ "$software" != 1 ]; then emulated+=("$name"); continue; fi
        [ -z "$path" ] || [ ! -e "$dir/device/physfn/infiniband" ] || continue
        nic_names+=("$name") nic_paths+=("$path") nic_rates+=("$rate") nic_uses+=(0)
        if [ -n "$path" ]; then nic_nodes+=("$(first_line "$dir/device/numa_node")")
        else nic_nodes+=(none); fi
    done
}

# nearness GPU_PATH GPU_NODE NIC: bridges in common, plus 1; 1: only the NUMA node; 0: hardware
# elsewhere; -1: an emulated device.
nearness() {
    local n
    [ -n "${nic_paths[$3]}" ] || { echo -1; return; }
    n=$(n_shared "$1" "${nic_paths[$3]}")
    if [ "$n" -gt 0 ]; then echo $((n + 1))
    elif [ "$2" = "${nic_nodes[$3]}" ]; then echo 1
    else echo 0; fi
}

# choose GPU: sets `chosen` to the index of the best device and `chosen_near` to its nearness. Once
# max_devices are in use it chooses only among those.
chosen= chosen_near=
choose() {
    local i near n_used=0 used
    chosen=
    for used in "${nic_uses[@]}"; do [ "$used" = 0 ] || n_used=$((n_used + 1)); done
    for i in "${!nic_names[@]}"; do
        [ $n_used -lt $max_devices ] || [ "${nic_uses[i]}" -gt 0 ] || continue
        near=$(nearness "${gpu_paths[$1]}" "${gpu_nodes[$1]}" "$i")
        if [ -n "$chosen" ]; then
            [ "$near" -ge "$chosen_near" ] || continue
            if [ "$near" = "$chosen_near" ]; then
                [ "${nic_rates[i]}" -ge "${nic_rates[chosen]}" ] || continue
                [ "${nic_rates[i]}" -gt "${nic_rates[chosen]}" ] ||
                    [ "${nic_uses[i]}" -lt "${nic_uses[chosen]}" ] || continue
            fi
        fi
        chosen=$i chosen_near=$near
    done
}

# Appends to `list` the devices that share a bridge with a GPU but were no GPU's choice.
list=()
add_rest() {
    local i gpu n_used=0 used
    for used in "${nic_uses[@]}"; do [ "$used" = 0 ] || n_used=$((n_used + 1)); done
    for i in "${!nic_names[@]}"; do
        [ "${nic_uses[i]}" = 0 ] && [ $n_used -lt $max_devices ] || continue
        for gpu in "${gpu_paths[@]}"; do
            [ "$(n_shared "$gpu" "${nic_paths[i]}")" -gt 0 ] || continue
            list+=("${nic_names[i]}") nic_uses[i]=1 n_used=$((n_used + 1))
            break
        done
    done
}

# Cuts `list` to its shortest head for which list[i mod n] gives the same names.
cut_to_period() {
    local n=${#list[@]} period i
    for ((period = 1; period < n; period++)); do
        for ((i = period; i < n; i++)); do [ "${list[i]}" = "${list[i % period]}" ] || break; done
        [ $i -lt $n ] || break
    done
    list=("${list[@]:0:period}")
}

no_device() {
    local why="this host has no RDMA device ($sys/class/infiniband is empty)"
    [ ${#emulated[@]} = 0 ] ||
        why="only emulated RDMA devices are active (${emulated[*]});"
    [ ${#emulated[@]} = 0 ] || why+=" BATON_RDMA_SOFTWARE=1 takes them"
    [ ${#idle[@]} = 0 ] || [ ${#emulated[@]} -gt 0 ] ||
        why="no RDMA device has an active port (${idle[*]}: link down or port not configured)"
    fail 1 "$why"
}

print_gpu() {
    local i pass why interface
    find_gpus
    find_nics
    if [ ${#gpu_paths[@]} = 0 ] && [ "$software" != 1 ]; then
        why="this host has no GPU, so no RDMA device is near one"
        if [ ${#nic_names[@]} != 0 ]; then
            why+=" (active RDMA devices: ${nic_names[*]};"
            why+=" without KVCACHE_RDMA_NICS baton takes those near its memory)"
        fi
        interface=$(cpu_interface) &&
            why+="; 'cpu' would give KV_CACHE_SOCKET_IFNAME=$interface" ||
            why+="; 'cpu' would find no interface either"
        fail 1 "$why"
    fi
    [ ${#nic_names[@]} -gt 0 ] || no_device
    for pass in bridge any; do # first GPUs that share a bridge with a device, then the others
        for i in "${!gpu_paths[@]}"; do
            [ -z "${list[i]:-}" ] || continue
            choose "$i"
            [ "$chosen_near" -gt 1 ] || [ $pass = any ] || continue
            list[i]=${nic_names[chosen]}
            nic_uses[chosen]=$((nic_uses[chosen] + 1))
            [ "$chosen_near" -gt 0 ] ||
                echo "$name: ${list[i]}, the choice for GPU $i (${gpu_paths[i]##* })," \
                    "is on another NUMA node" >&2
        done
    done
    if [ ${#gpu_paths[@]} = 0 ]; then list=("${nic_names[@]:0:max_devices}"); else add_rest; fi
    cut_to_period
    (IFS=,; echo "$variable=${list[*]}")
}

# Names of interfaces with an IPv4 address that others can reach, one per line.
with_ipv4() {
    local text
    if [ -n "${IP_ADDR_FILE:-}" ]; then text=$(cat "$IP_ADDR_FILE" 2>/dev/null) || return 1
    else text=$(ip -o -4 addr show) || return 1; fi
    awk '$3 == "inet" && $4 !~ /^(127|169\.254)\./ { sub(/@.*/, "", $2); print $2 }' <<<"$text" |
        sort -uV
}

# Up, or a driver that does not say but has a carrier.
is_up() {
    case $(first_line "$sys/class/net/$1/operstate") in
    up) return 0 ;;
    unknown) [ "$(first_line "$sys/class/net/$1/carrier")" = 1 ] ;;
    *) return 1 ;;
    esac
}

is_bond() { [ -d "$sys/class/net/$1/bonding" ]; }
is_hardware() { [ -e "$sys/class/net/$1/device" ]; }

is_near_gpu() {
    local path gpu
    path=$(pci_path "$sys/class/net/$1/device")
    for gpu in "${gpu_paths[@]}"; do [ "$(n_shared "$gpu" "$path")" = 0 ] || return 0; done
    return 1
}

# A bridge or VLAN whose traffic leaves by hardware or a bond.
is_on_hardware() {
    local lower
    for lower in "$sys/class/net/$1"/lower_*; do
        lower=${lower##*/lower_}
        ! is_hardware "$lower" && ! is_bond "$lower" || return 0
    done
    return 1
}

cpu_interface() {
    local names name rule
    names=$(with_ipv4) || return 2
    for rule in bond hardware on_hardware; do
        for name in $names; do
            [ "$name" != lo ] && is_up "$name" && "is_$rule" "$name" || continue
            [ $rule != hardware ] || ! is_near_gpu "$name" || continue
            echo "$name"
            return 0
        done
    done
    return 1
}

print_cpu() {
    local interface status=0
    find_gpus
    interface=$(cpu_interface) || status=$?
    [ $status != 2 ] ||
        fail 1 "the IPv4 addresses cannot be read: 'ip -o -4 addr' (package iproute2) fails"
    [ $status = 0 ] ||
        fail 1 "no active network interface with an IPv4 address was found that is not a GPU's"
    echo "$variable=$interface"
}

[ $# = 1 ] || fail 2 "usage: $name gpu|cpu"
[ -d "$sys/class" ] || fail 1 "$sys is not a sysfs tree"
case $1 in
gpu) print_gpu ;;
cpu) print_cpu ;;
xpu | vxpu | vcpu | cpu_ib)
    fail 2 "'$1' is for hardware that baton does not drive; gpu and cpu are known"
    ;;
-h | --help) sed -n '2,23s/^# \{0,1\}//p' "$0" ;;
*) fail 2 "there is no type '$1'; gpu and cpu are known" ;;
esac
