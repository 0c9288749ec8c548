#!/bin/busybox sh
# init.sh - first process of the virtual machine (machine.py): modules, file systems, then guest.sh in the host's root file system.
# Says on the console what fails; a kernel that loses this process panics, which ends the machine.
/bin/busybox mkdir -p /sbin /usr/bin /usr/sbin
/bin/busybox --install -s
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
. /setting

for module in /modules/*; do
    insmod "$module" 2>/dev/null || grep -q "^$(basename "$module" .ko | cut -d- -f2- | tr - _) " /proc/modules || echo "init: $module is not loaded"
done

must() { "$@" || { echo "init: failed: $*"; poweroff -f; }; }

# The host's root below, memory above it: whatever the machine writes is its own.
must mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=512000,cache=loose root /below
must mount -t tmpfs -o size=90% tmpfs /above
mkdir /above/upper /above/work
must mount -t overlay -o lowerdir=/below,upperdir=/above/upper,workdir=/above/work overlay /root
for t in proc sysfs devtmpfs; do
    d=${t%fs}; d=${d%tmp}
    must mount -t $t $t /root/$d
done
mkdir -p /root/dev/shm /root/dev/pts
for d in /run /dev/shm; do must mount -t tmpfs tmpfs /root$d; done
must mount -t devpts devpts /root/dev/pts
[ -z "$WORK" ] || must mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000 work "/root$WORK"

mkdir /root/run/vm
cp /guest /setting /command /root/run/vm/
chroot /root /bin/bash /run/vm/guest
poweroff -f
