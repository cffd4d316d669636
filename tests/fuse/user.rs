//! A user who is not root mounts by `fusermount3`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use super::can_mount;
use crate::support::{cowslip, outcome, peers_are_installed};

/// In a mount namespace of its own: a device that all may open, and then another user.
const NAMESPACE: &str = "
mount --make-rprivate /
mknod device c 10 229
chmod 666 device
mount --bind device /dev/fuse
cd home
exec setpriv --reuid 65534 --regid 65534 --clear-groups sh -euc \"$SCRIPT\"";

const SCRIPT: &str = "
fails() { if \"$@\" 2>said; then echo \"'$*' should fail\"; exit 1; fi; }
cowslip() { ../cowslip \"$@\"; }
cowslip create -q -f qcow2 a.qcow2 4M
for sandbox in off on; do
    cowslip mount --sandbox $sandbox --threads 2 a.qcow2 disk
    grep -q \"$PWD/disk .*user_id=65534\" /proc/self/mountinfo
    printf 'by %s' $sandbox | dd of=disk bs=512 seek=9 conv=notrunc status=none
    fails cowslip mount a.qcow2 disk
    grep -q 'mounted there already' said
    cowslip umount disk
    test ! -e disk
    cowslip check -q a.qcow2
    cowslip io -c 'read -v 4608 16' a.qcow2 | grep -q \"by.$sandbox\"
done
# A file in use is unmounted when the server is asked to end.
../cowslip mount --foreground a.qcow2 disk 2>server &
server=$!
until grep -q \"$PWD/disk \" /proc/self/mountinfo; do sleep 0.01; done
exec 5<disk
kill $server
wait $server
grep -q 'in use' server
exec 5<&-
# What a killed server has left is unmounted by the next.
../cowslip mount --foreground a.qcow2 disk &
server=$!
until grep -q \"$PWD/disk \" /proc/self/mountinfo; do sleep 0.01; done
head -c 1 disk > read # It serves.
kill -9 $server
wait $server || true
cowslip mount a.qcow2 disk 2>said
grep -q 'had ended' said
fusermount3 -u disk
fails cowslip mount --allow-other a.qcow2 disk
grep -q 'user_allow_other' said || grep -q 'allow_other' said
PATH=/nowhere fails ../cowslip mount a.qcow2 disk
grep -q 'fusermount3 is not installed' said
echo all is well";

#[test]
fn another_user_mounts_by_the_helper() {
    let programs = ["unshare", "setpriv", "fusermount3"];
    if !can_mount() || !peers_are_installed(&programs) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let all = |mode| fs::Permissions::from_mode(mode);
    fs::set_permissions(dir.path(), all(0o755)).unwrap();
    fs::copy(cowslip().get_program(), path("cowslip")).unwrap();
    fs::set_permissions(path("cowslip"), all(0o755)).unwrap();
    fs::create_dir(path("home")).unwrap();
    fs::set_permissions(path("home"), all(0o777)).unwrap();
    let mut command = Command::new("timeout");
    command.args(["120", "unshare", "--mount", "sh", "-euc", NAMESPACE]);
    command.env("SCRIPT", SCRIPT).current_dir(dir.path());
    let ended = outcome(&mut command);
    let said = String::from_utf8_lossy(&ended.stdout);
    if String::from_utf8_lossy(&ended.stderr).contains("mknod") {
        return eprintln!("SKIPPED: no device can be made here");
    }
    assert!(
        ended.status.success() && said.ends_with("all is well\n"),
        "{ended:?}, {:?}",
        fs::read_to_string(path("home/said"))
    );
}
