//! Opening: settings, words for what is missing, a bounded time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cowslip_block::file::BlockFile;
use cowslip_rbd::{Access, Ceph, RbdName, Settings, open_by};

use crate::support::{cluster, settings, wait};

#[test]
fn what_is_missing_is_named_with_the_answer() {
    let Some(cluster) = cluster() else { return };
    cluster.empty("golden", 1 << 20);
    for (name, access, words) in [
        (
            "rbd:rbd/other",
            Access::Read,
            "Could not open 'the image': Ceph has no image 'other' in pool 'rbd' (-2, No such file",
        ),
        ("rbd:rbd/other", Access::Write, "Ceph has no image 'other'"),
        ("rbd:lost/golden", Access::Read, "Ceph has no pool 'lost'"),
        (
            "rbd:rbd/space/golden",
            Access::Read,
            "no image 'golden' in pool 'rbd/space'",
        ),
        (
            "rbd:rbd/golden@v1",
            Access::Read,
            "image 'golden' in pool 'rbd' of Ceph has no snapshot 'v1' (-2",
        ),
        (
            "rbd:rbd/golden@v1",
            Access::Write,
            "the snapshot 'v1' cannot be written",
        ),
        (
            "rbd:rbd/golden:unknown=1",
            Access::Read,
            "Ceph does not take the setting 'unknown' (-2",
        ),
        (
            "rbd:rbd/golden:conf=/does/not/exist",
            Access::Read,
            "Could not read Ceph's settings in '/does/not/exist' (-2",
        ),
    ] {
        let refusal = cluster.refusal(name, access);
        assert!(refusal.contains(words), "{name}: {refusal}");
    }
    for (faults, words) in [
        (
            "rados_connect 1 110",
            "no monitor of Ceph has answered within 30 seconds (-110",
        ),
        (
            "rados_connect 2 13",
            "refuses client.admin (-13, Permission denied): is its key in /etc",
        ),
        (
            "rbd_open 1 1",
            "does not let client.admin have image 'golden' in pool 'rbd' (-1",
        ),
        ("rbd_stat 1 5", "does not say the size of image 'golden'"),
    ] {
        // Numbers of calls go on counting.
        let (call, rest) = faults.split_once(' ').unwrap();
        let (_, error) = rest.split_once(' ').unwrap();
        let each: Vec<String> = (1..40)
            .map(|number| format!("{call} {number} {error}"))
            .collect();
        cluster.fake.put("faults", &each.join("\n")).unwrap();
        let refusal = cluster.refusal("rbd:rbd/golden", Access::Read);
        assert!(refusal.contains(words), "{faults}: {refusal}");
    }
    cluster.fake.remove("faults").unwrap();
    cluster.fake.remove("ceph.conf").unwrap();
    let refusal = cluster.refusal("rbd:rbd/golden", Access::Read);
    assert!(
        refusal.contains("nor 'server' names its monitors"),
        "{refusal}"
    );
    let made = cluster.calls("rados_create").len();
    assert_eq!(
        cluster.calls("rados_shutdown").len(),
        made,
        "each was let go"
    );
}

#[test]
fn libraries_that_are_not_there_are_named() {
    let nowhere = tempfile::tempdir().unwrap();
    let why = Ceph::load(Some(nowhere.path())).unwrap_err();
    assert!(why.contains("librados.so.2"), "{why}");
}

#[test]
fn settings_reach_ceph_before_the_connection() {
    let Some(cluster) = cluster() else { return };
    std::fs::create_dir(cluster.fake.image("rbd/space")).unwrap();
    std::fs::write(cluster.fake.image("rbd/space/golden"), [7; 512]).unwrap();
    let name = RbdName {
        wait_timeout: Some(Duration::from_secs(9)),
        ..RbdName::of_file_name("rbd:rbd/space/golden:id=me:mon_host=mon1:debug_rbd=0")
            .unwrap()
            .unwrap()
    };
    let settings = Settings {
        key: Some("SECRET==".to_string()),
        cached: false,
        wait_timeout: Some(Duration::from_secs(60)),
        ..settings(Access::Read)
    };
    let file = wait(open_by(Some(Arc::clone(&cluster.ceph)), &name, settings)).unwrap();
    assert_eq!(wait(file.len()).unwrap(), 512);
    let calls = cluster.fake.calls().unwrap();
    let expected = [
        "rados_create me",
        "rados_conf_read_file usual",
        "rados_conf_set client_mount_timeout=9",
        "rados_conf_set rados_mon_op_timeout=9",
        "rados_conf_set rados_osd_op_timeout=9",
        "rados_conf_set rbd_cache=false",
        "rados_conf_set key=SECRET==",
        "rados_conf_set mon_host=mon1",
        "rados_conf_set debug_rbd=0",
        "rados_connect mon1",
        "rados_ioctx_create rbd",
        "rbd_open golden ro",
    ];
    assert_eq!(calls, expected);
}

#[test]
fn without_a_bound_requests_wait_as_long_as_ceph_does() {
    let Some(cluster) = cluster() else { return };
    cluster.empty("golden", 512);
    cluster.open("rbd:rbd/golden", Access::Read).unwrap();
    assert!(cluster.calls("rados_conf_set rados_").is_empty());
    assert_eq!(
        cluster.calls("rados_conf_set"),
        [
            "rados_conf_set client_mount_timeout=30",
            "rados_conf_set rbd_cache=true"
        ]
    );
}

#[test]
fn a_cluster_that_does_not_answer_is_given_up_and_left_in_the_end() {
    let Some(cluster) = cluster() else { return };
    cluster.empty("golden", 512);
    cluster.fake.put("deaf", "").unwrap();
    let name = RbdName::of_file_name("rbd:rbd/golden").unwrap().unwrap();
    let settings = Settings {
        wait_timeout: Some(Duration::from_secs(1)),
        ..settings(Access::Read)
    };
    let begun = Instant::now();
    let opened = wait(open_by(Some(Arc::clone(&cluster.ceph)), &name, settings));
    let refusal = opened.unwrap_err().to_string();
    assert!(
        refusal.contains("has not opened image 'golden' of pool 'rbd' within 1 seconds"),
        "{refusal}"
    );
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert!(cowslip_rbd::is_in_use());
    // What comes too late is closed.
    cluster.fake.remove("deaf").unwrap();
    cluster.wait_for("rados_shutdown");
    assert_eq!(cluster.calls("rbd_close"), ["rbd_close golden"]);
    cowslip_rbd::end(1);
    assert!(!cowslip_rbd::is_in_use());
}

#[test]
fn an_image_is_made_where_there_is_none() {
    let Some(cluster) = cluster() else { return };
    let file = cluster.open("rbd:rbd/new", Access::Create).unwrap();
    assert_eq!(wait(file.len()).unwrap(), 0);
    wait(file.set_len(100)).unwrap();
    drop(file);
    let file = cluster.open("rbd:rbd/new", Access::Create).unwrap();
    assert_eq!(wait(file.len()).unwrap(), 100, "one that exists stays");
    assert_eq!(cluster.calls("rbd_create"), ["rbd_create new 0 0"]);
    cluster.fake.put("faults", "rbd_create 2 122").unwrap();
    let refusal = cluster.refusal("rbd:rbd/another", Access::Create);
    assert!(refusal.contains("(-122, Disk quota exceeded)"), "{refusal}");
}
