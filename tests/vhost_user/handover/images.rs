//! Disks of all kinds that change their servers: chains, data files, encrypted images, servers in
//! the background.

use super::*;
use crate::support::run;

/// Runs the command in a directory.
fn ours(dir: &Path, words: &str) {
    run(cowslip().args(words.split(' ')).current_dir(dir));
}

/// Hands over a few times; in between successors are killed, and the last has not the features of
/// the connection, which is known only when the server is at rest: it opens the image again.
/// Returns the directory.
fn changes_servers(dir: tempfile::TempDir, image: &str, disk: Disk) -> tempfile::TempDir {
    let image = dir.path().join(image);
    let misfit = disk.clone();
    let mut disk = disk;
    disk.options.push("--in-order".to_string());
    let features = FEATURES | front::IN_ORDER;
    let mut rig = Rig::of(features, (dir, image), (disk, &[]));
    rig.work(Duration::from_millis(50), || false);
    for _ in 0..3 {
        rig.hand_over();
        let mut next = rig.successor();
        rig.work(Duration::from_millis(15), || false);
        next.kill();
        rig.work(Duration::from_millis(50), || false);
        if let status @ Some(_) = rig.served.child.try_wait().unwrap() {
            expect_handed_over(&mut rig.served, status);
            rig.served = rig.disk.serve(&rig.socket, &[]);
            rig.connect();
        }
    }
    let mut next = misfit.serve(&rig.socket, &["--handover"]);
    let mut status = None;
    rig.work(Duration::from_secs(20), || {
        status = next.child.try_wait().unwrap();
        status.is_some()
    });
    assert!(status.is_some_and(|status| !status.success()), "{status:?}");
    let text = said(&mut next);
    assert!(rig.served.child.try_wait().unwrap().is_none(), "{text}");
    rig.work(Duration::from_millis(20), || false);
    rig.finish_unchecked()
}

#[test]
fn a_chain_changes_its_server() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let raw = std::fs::File::create(at.join("raw")).unwrap();
    raw.set_len(IMAGE_BYTES).unwrap();
    ours(at, "create -q -f qcow2 -b raw -F raw below");
    ours(at, "create -q -f qcow2 -b below -F qcow2 middle");
    let create = "create -q -f qcow2 -o cluster_size=4k,extended_l2=off -b middle -F qcow2 a";
    ours(at, create);
    let disk = Disk::of_file(&at.join("a"));
    let dir = changes_servers(dir, "a", disk);
    check(&dir.path().join("a"));
}

#[test]
fn an_image_with_a_data_file_changes_its_server() {
    let dir = tempfile::tempdir().unwrap();
    ours(dir.path(), "create -q -f qcow2 -o data_file=data a 16M");
    let disk = Disk::of_file(&dir.path().join("a"));
    let dir = changes_servers(dir, "a", disk);
    check(&dir.path().join("a"));
}

fn expect_refused(mut next: Served, words: &str) {
    assert!(!next.child.wait().unwrap().success());
    let text = said(&mut next);
    assert!(text.contains(words), "{text}");
}

const SECRET: &str = "--object secret,id=s,data=hunter2";
const WRONG_SECRET: &str = "--object secret,id=s,data=hunter3";

/// Makes an encrypted disk. Returns its directory, and the disk with any secret.
fn encrypted(format: &str, options: &str) -> (tempfile::TempDir, impl Fn(&str) -> Disk) {
    let dir = tempfile::tempdir().unwrap();
    let create = format!("create -q {SECRET} -f {format} -o {options} a 16M");
    ours(dir.path(), &create);
    let key = match format {
        "luks" => "key-secret",
        _ => "encrypt.key-secret",
    };
    let path = dir.path().join("a");
    let path = path.display();
    let name = format!(r#"json:{{"driver":"{format}","file.filename":"{path}","{key}":"s"}}"#);
    let with = move |secret: &str| Disk {
        name: name.clone(),
        options: secret.split(' ').map(str::to_string).collect(),
    };
    (dir, with)
}

/// Runs a command of the shell on a disk.
fn io(disk: &Disk, command: &str) {
    let mut io = cowslip();
    io.args(["io", "-c", command]).args(&disk.options);
    run(io.arg(&disk.name));
}

#[test]
fn an_encrypted_image_changes_its_server() {
    let options = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    let (dir, with) = encrypted("qcow2", options);
    // A wrong secret is refused before anything else happens.
    let wrong = with(WRONG_SECRET).serve(&dir.path().join("socket"), &["--handover"]);
    expect_refused(wrong, "Invalid password");
    let dir = changes_servers(dir, "a", with(SECRET));
    check(&dir.path().join("a"));
}

#[test]
fn an_encrypted_volume_changes_its_server() {
    let (dir, with) = encrypted("luks", "key-secret=s,iter-time=10");
    // Space that was never written is noise.
    io(&with(SECRET), "write -P 0 0 16M");
    changes_servers(dir, "a", with(SECRET));
}

#[test]
fn a_guest_does_not_wait_for_a_key_to_be_derived() {
    let options = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=1000";
    let (dir, with) = encrypted("qcow2", options);
    let begun = Instant::now();
    io(&with(SECRET), "read 0 512");
    let opening = begun.elapsed();
    let image = dir.path().join("a");
    let mut rig = Rig::of(FEATURES, (dir, image), (with(SECRET), &[]));
    rig.work(Duration::from_millis(50), || false);
    let gap = rig.hand_over();
    assert!(gap < opening / 2, "{gap:?} of {opening:?}");
    rig.finish();
}

#[test]
fn a_server_in_the_background_hands_over_to_one_in_the_background() {
    use rustix::process::{Pid, Signal, kill_process};

    let dir = tempfile::tempdir().unwrap();
    let (image, socket) = (image(dir.path()), dir.path().join("socket"));
    let pid_file = dir.path().join("pid");
    let options = ["--fork", "--pid-file", pid_file.to_str().unwrap()];
    let start = |more: &[&str]| {
        let options = [&options[..], more].concat();
        let mut starter = Served::start(&image, &socket, &options);
        let status = starter.child.wait().unwrap();
        assert!(status.success(), "{status}");
        let number = std::fs::read_to_string(&pid_file).unwrap();
        Pid::from_raw(number.trim().parse().unwrap()).unwrap()
    };
    let wait_for_end = |pid: Pid| {
        let begun = Instant::now();
        // One that nobody has waited for is there without a program.
        let program = format!("/proc/{}/exe", pid.as_raw_nonzero());
        while std::fs::read_link(&program).is_ok() {
            assert!(begun.elapsed() < Duration::from_secs(20), "it goes on");
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    let mut pid = start(&[]);
    let mut front = Front::connect(&socket, FEATURES).unwrap();
    let mut queue = front.queue(0, 16).unwrap();
    for round in 0..4u8 {
        front.memory.write(DATA_AT, &[round + 1; 512]);
        assert_eq!(
            queue.request(OUT, round.into(), &[(DATA_AT, 512)]).unwrap(),
            0
        );
        let next = start(&["--handover"]);
        assert_ne!(next, pid);
        wait_for_end(pid);
        pid = next;
        let data = [(DATA_AT + 512, 512)];
        assert_eq!(queue.request(IN, round.into(), &data).unwrap(), 0);
        let mut read = [0; 512];
        front.memory.read(DATA_AT + 512, &mut read);
        assert_eq!(read, [round + 1; 512]);
    }
    drop((queue, front));
    kill_process(pid, Signal::TERM).unwrap();
    wait_for_end(pid);
    check(&image);
    assert!(!socket.exists(), "the name is removed");
}
