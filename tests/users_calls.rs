//! The command lines of programs that call `qemu-img` and `qemu-nbd`, as their sources have them,
//! through links of these names and by the machine's QEMU: the same exit code, the same words
//! (which they parse) and the same disks.
//!
//! Each story is what one program does with its images, line after line, on equal files; `$DIR` is
//! their directory, as most of them name files by whole paths. Only sizes are smaller, and
//! `iter-time` is set where keys are made, which otherwise takes seconds. What is not supported,
//! such as other formats and images behind http, is in `foreign_formats.rs`; devices of the kernel
//! (`qemu-nbd --connect`) are left out.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::support::golden::words;
use crate::support::judge::{Layout, comparable};
use crate::support::twins::{Twin, compare_files, qemu_img, twins};
use crate::support::{outcome, program, run, scratch, scratch_beside};

/// The behaviour of a program, and its place in the source.
struct Story {
    project: &'static str,
    file: &'static str,
    lines: &'static [&'static str],
}

const STORIES: &[Story] = &[
    Story {
        project: "libvirt",
        file: "src/storage/storage_util.c, virStorageBackendCreateQemuImgCmdFromVol",
        lines: &[
            "qemu-img create -f qcow2 -o compat=0.10 $DIR/vol0.qcow2 2048K",
            // virt-install, virt-manager and virt-clone run none of the programs: they ask libvirt
            // for volumes, with lazy_refcounts if qcow2 (virtinst/storage.py, validate), all of it
            // allocated unless `sparse=yes`.
            "qemu-img create -f qcow2 -o compat=1.1,lazy_refcounts $DIR/vol.qcow2 2048K",
            "qemu-img create -f qcow2 -o preallocation=metadata,compat=1.1,lazy_refcounts $DIR/vol1.qcow2 2048K",
            "qemu-img create -f qcow2 -o preallocation=falloc,compat=1.1,cluster_size=131072,extended_l2=on $DIR/vol2.qcow2 2048K",
            "qemu-img create -f qcow2 -o nocow=on,compat=1.1 $DIR/vol3.qcow2 2048K",
            "qemu-img create -f qcow2 -b $DIR/base.qcow2 -o backing_fmt=qcow2,compat=1.1 $DIR/over.qcow2 2048K",
            "qemu-img create -f qcow2 -b $DIR/base.raw -o backing_fmt=raw,compat=0.10 $DIR/over2.qcow2",
            "qemu-img convert -f raw -O qcow2 -o compat=0.10 $DIR/base.raw $DIR/copy.qcow2",
            "qemu-img convert -f qcow2 -O raw $DIR/base.qcow2 $DIR/copy.raw",
            "qemu-img convert -f qcow2 -O qcow2 -o compat=1.1,lazy_refcounts $DIR/top.qcow2 $DIR/copy2.qcow2",
        ],
    },
    Story {
        project: "libvirt",
        file: "src/storage/storage_util.c, encrypted volumes",
        lines: &[
            "qemu-img create -f luks --object secret,id=vol.img_encrypt0,file=$DIR/secret -o key-secret=vol.img_encrypt0,iter-time=10 $DIR/vol.img 2048K",
            "qemu-img create -f qcow2 --object secret,id=v_encrypt0,file=$DIR/secret -o encrypt.format=luks,encrypt.key-secret=v_encrypt0,encrypt.iter-time=10,compat=1.1 $DIR/v.qcow2 2048K",
            "qemu-img convert --image-opts -n --target-image-opts --object secret,id=v_encrypt0,file=$DIR/secret driver=raw,file.filename=$DIR/base.raw driver=qcow2,file.filename=$DIR/v.qcow2,encrypt.key-secret=v_encrypt0",
            "qemu-img convert --image-opts -n --target-image-opts --object secret,id=vol.img_encrypt0,file=$DIR/secret --object secret,id=v_encrypt0,file=$DIR/secret driver=qcow2,file.filename=$DIR/v.qcow2,encrypt.key-secret=v_encrypt0 driver=luks,file.filename=$DIR/vol.img,key-secret=vol.img_encrypt0",
            // Not libvirt's: what the volumes hold.
            "qemu-img convert --object secret,id=k,file=$DIR/secret --image-opts driver=luks,file.filename=$DIR/vol.img,key-secret=k -O raw $DIR/plain.raw",
            "qemu-img convert --object secret,id=k,file=$DIR/secret --image-opts driver=qcow2,file.filename=$DIR/v.qcow2,encrypt.key-secret=k -O raw $DIR/plain2.raw",
            "qemu-img resize --object secret,id=vol.img_encrypt0,file=$DIR/secret --image-opts driver=luks,key-secret=vol.img_encrypt0,file.filename=$DIR/vol.img 4194304",
            "qemu-img resize --object secret,id=v_encrypt0,file=$DIR/secret --image-opts driver=qcow2,encrypt.key-secret=v_encrypt0,file.filename=$DIR/v.qcow2 4194304",
        ],
    },
    Story {
        project: "libvirt",
        file: "src/storage/storage_util.c, storageBackendResizeQemuImg; virStorageBackendQemuImgSupportsCompat",
        lines: &[
            "qemu-img create -o ? -f qcow2 /dev/null",
            "qemu-img create -f qcow2 -o? /dev/null",
            "qemu-img resize $DIR/base.qcow2 3145728",
            "qemu-img resize --shrink $DIR/base.qcow2 1048576",
            "qemu-img resize $DIR/base.qcow2 524288",
        ],
    },
    Story {
        project: "libvirt",
        file: "src/qemu/qemu_snapshot.c, src/qemu/qemu_domain.c (qemuDomainSnapshotForEachQcow2)",
        lines: &[
            "qemu-img snapshot -c 1700000000 $DIR/base.qcow2",
            "qemu-img snapshot -a 1700000000 $DIR/base.qcow2",
            "qemu-img snapshot -d 1700000000 $DIR/base.qcow2",
            "qemu-img create -f qcow2 -o backing_fmt=qcow2,backing_file=$DIR/base.qcow2 $DIR/base.snap1",
            "qemu-img create -f qcow2 -o backing_fmt=raw,backing_file=$DIR/a,,b.raw $DIR/snap2",
        ],
    },
    Story {
        project: "KubeVirt CDI",
        file: "pkg/image/qemu.go",
        lines: &[
            "qemu-img info --output=json $DIR/base.qcow2",
            "prlimit --as=1073741824 --cpu=30 qemu-img info --output=json $DIR/top.qcow2",
            "qemu-img convert -t writeback -p -O raw $DIR/top.qcow2 $DIR/disk.img",
            "qemu-img convert -t none -p -O raw $DIR/base.qcow2 $DIR/disk2.img",
            "qemu-img convert -t writeback -p -O raw $DIR/top.qcow2 $DIR/disk3.img -o preallocation=falloc",
            "qemu-img convert -t writeback -p -O raw $DIR/top.qcow2 $DIR/disk3.img -o preallocation=full",
            "qemu-img convert -t writeback -p -O raw $DIR/top.qcow2 $DIR/disk3.img -S 0",
            // Looked for in what is said: "Unsupported preallocation mode".
            "qemu-img convert -t writeback -p -O raw $DIR/top.qcow2 $DIR/disk4.img -o preallocation=metadata",
            "qemu-img resize -f raw $DIR/disk.img 4194304",
            "qemu-img resize -f raw $DIR/disk.img 5242880 --preallocation=falloc",
            "qemu-img resize -f raw $DIR/disk.img 6291456 --preallocation=full",
            "qemu-img create -f raw $DIR/blank.img 1048576 -o preallocation=falloc",
            "qemu-img create -f raw $DIR/blank.img 1048576",
            "qemu-img rebase -p -u -F raw -b $DIR/disk.img $DIR/delta.qcow2",
            "qemu-img commit -p $DIR/delta.qcow2",
        ],
    },
    Story {
        project: "oVirt vdsm",
        file: "lib/vdsm/storage/qemuimg.py",
        lines: &[
            "qemu-img info --output json -f qcow2 -U $DIR/top.qcow2",
            "prlimit --cpu=30 --as=1073741824 qemu-img info --output json -f qcow2 $DIR/base.qcow2",
            "qemu-img measure --output json -O qcow2 'json:{\"file\": {\"driver\": \"file\", \"filename\": \"$DIR/top.qcow2\"}, \"driver\": \"qcow2\"}'",
            "qemu-img measure --output json -O qcow2 'json:{\"file\": {\"driver\": \"file\", \"filename\": \"$DIR/top.qcow2\"}, \"driver\": \"qcow2\", \"backing\": null}'",
            "qemu-img measure --output json -O raw 'json:{\"file\": {\"driver\": \"file\", \"filename\": \"$DIR/base.raw\"}, \"driver\": \"raw\"}'",
            "qemu-img create -f qcow2 -o compat=1.1 -b $DIR/base.qcow2 -F qcow2 -u $DIR/leaf.qcow2 3145728",
            "qemu-img create -f qcow2 -o compat=0.10 -o preallocation=metadata $DIR/new.qcow2 2097152",
            "qemu-img create -f raw -o preallocation=falloc $DIR/new.raw 2097152",
            "qemu-img check --output json -f qcow2 $DIR/base.qcow2",
            "qemu-img convert -p -t none -T none -f qcow2 -O raw $DIR/top.qcow2 $DIR/flat.raw",
            "qemu-img convert -p -t none -T none -f raw -O qcow2 -o compat=1.1 $DIR/base.raw $DIR/flat.qcow2",
            "qemu-img convert -p -t none -T none -f qcow2 -O qcow2 -o compat=1.1,backing_file=base.qcow2,backing_fmt=qcow2 $DIR/top.qcow2 $DIR/top2.qcow2",
            "qemu-img convert -p -t none -T none -f qcow2 -O qcow2 -o compat=1.1 -c $DIR/base.qcow2 $DIR/packed.qcow2",
            "qemu-img convert -p -t none -T none -f qcow2 -O raw -n -W $DIR/base.qcow2 $DIR/flat.raw",
            "qemu-img convert -p -t none -T none -f qcow2 -O qcow2 -o compat=1.1 --bitmaps $DIR/marked.qcow2 $DIR/marked2.qcow2",
            "qemu-img map --output json $DIR/top.qcow2",
            "qemu-img amend -o compat=1.1 $DIR/old.qcow2",
            "qemu-img resize -f qcow2 $DIR/old.qcow2 4194304",
            "qemu-img rebase -t none -T none -u -f qcow2 -F qcow2 -b base.qcow2 $DIR/top.qcow2",
            "qemu-img rebase -t none -T none -f qcow2 -F raw -b base.raw $DIR/top.qcow2",
            "qemu-img compare -p -f qcow2 -F raw $DIR/base.qcow2 $DIR/flat.raw",
            "qemu-img compare -p -f qcow2 -F qcow2 -s $DIR/base.qcow2 $DIR/old.qcow2",
            "qemu-img bitmap --add --enable $DIR/base.qcow2 6a05 -g 65536",
            "qemu-img bitmap --add --disable $DIR/base.qcow2 7b16",
            "qemu-img bitmap --merge b0 -F qcow2 -b $DIR/marked.qcow2 $DIR/base.qcow2 6a05",
            "qemu-img info --output json -f qcow2 $DIR/base.qcow2",
            "qemu-img bitmap --remove $DIR/base.qcow2 7b16",
            "qemu-img commit -p -t none -b $DIR/base.raw -f qcow2 $DIR/top.qcow2",
            "qemu-img commit -p -t none -d -f qcow2 $DIR/top.qcow2",
        ],
    },
    Story {
        project: "incus",
        file: "internal/server/storage/utils.go; internal/server/storage/drivers/utils_qcow2.go",
        lines: &[
            "prlimit --cpu=2 --as=1073741824 qemu-img info -f qcow2 --output=json $DIR/base.qcow2",
            "nice -n19 qemu-img convert -p -f qcow2 -O raw -t writeback $DIR/base.qcow2 $DIR/root.img",
            "nice -n19 qemu-img convert -p -f qcow2 -O raw -t writeback -T none -t none $DIR/base.qcow2 $DIR/root.img",
            "nice -n19 qemu-img convert -p -f qcow2 -O raw -t writeback -W -n --target-is-zero $DIR/base.qcow2 $DIR/zero.raw",
            "qemu-img create -f qcow2 $DIR/vol.qcow2 2097152b",
            "qemu-img create -f qcow2 -b $DIR/base.qcow2 -F qcow2 $DIR/snap.qcow2",
            "qemu-img resize $DIR/vol.qcow2 4194304b",
            "qemu-img rebase -u -b $DIR/old.qcow2 -F qcow2 $DIR/snap.qcow2",
            "qemu-img rebase -u -b $DIR/base.qcow2 -F qcow2 $DIR/snap.qcow2",
            "qemu-img info --backing-chain --output=json $DIR/snap.qcow2",
            "qemu-img commit -f qcow2 $DIR/snap.qcow2",
        ],
    },
    Story {
        project: "Proxmox VE",
        file: "pve-storage: src/PVE/Storage/Plugin.pm, src/PVE/Storage/Common.pm; qemu-server: src/PVE/QemuServer/QemuImage.pm",
        lines: &[
            "qemu-img create -o preallocation=off -f raw $DIR/vm-100-disk-0.raw 2048K",
            "qemu-img create -o preallocation=metadata -f qcow2 $DIR/vm-100-disk-1.qcow2 2048K",
            "qemu-img create -b ./base.qcow2 -F qcow2 -f qcow2 $DIR/vm-101-disk-0.qcow2",
            "qemu-img create -F qcow2 -b base.qcow2 -f qcow2 $DIR/vm-102-disk-0.qcow2 -o extended_l2=on,cluster_size=128k",
            "qemu-img create -F qcow2 -b base.qcow2 -f qcow2 $DIR/vm-103-disk-0.qcow2 -o extended_l2=on,cluster_size=128k,preallocation=metadata",
            "qemu-img info --output=json $DIR/vm-101-disk-0.qcow2 -f qcow2 --backing-chain",
            "qemu-img info --output=json $DIR/base.raw",
            "qemu-img measure --output=json --size 2048K -O qcow2 -o cluster_size=128k,extended_l2=on",
            "qemu-img resize --preallocation=metadata -f qcow2 $DIR/vm-100-disk-1.qcow2 4194304",
            "qemu-img resize -f qcow2 $DIR/vm-101-disk-0.qcow2 4194304",
            "qemu-img snapshot -c before $DIR/base.qcow2",
            "qemu-img convert -p -n -l snapshot.name=before -f qcow2 -O raw $DIR/base.qcow2 $DIR/vm-100-disk-0.raw",
            "qemu-img convert -p -n -T none -r 102400K -f raw -O qcow2 $DIR/base.raw $DIR/vm-100-disk-1.qcow2",
            "qemu-img convert -p -n -f raw --target-image-opts $DIR/base.raw driver=qcow2,discard-no-unref=true,file.driver=file,file.filename=$DIR/vm-100-disk-1.qcow2",
            "qemu-img snapshot -a before $DIR/base.qcow2",
            "qemu-img snapshot -d before $DIR/base.qcow2",
            "qemu-img rebase -b ./old.qcow2 -F qcow2 -f qcow2 $DIR/vm-101-disk-0.qcow2",
            "qemu-img commit $DIR/vm-101-disk-0.qcow2",
        ],
    },
    Story {
        project: "GNS3",
        file: "gns3-server: gns3server/compute/qemu/qemu_vm.py, gns3server/compute/qemu/utils/qcow2.py",
        lines: &[
            "qemu-img create -f qcow2 -o cluster_size=65536 -o lazy_refcounts=off -o preallocation=off -o refcount_bits=16 $DIR/hda_disk.qcow2 2M",
            "qemu-img create -f raw $DIR/hdb_disk.raw 2M",
            "qemu-img resize $DIR/hda_disk.qcow2 +2M",
            "qemu-img info --output=json $DIR/base.qcow2",
            "qemu-img create -o backing_file=$DIR/base.qcow2 -F qcow2 -f qcow2 $DIR/linked.qcow2",
            "qemu-img create -b $DIR/base.qcow2 -F qcow2 -f qcow2 -u $DIR/linked2.qcow2 2097152",
            "qemu-img check $DIR/linked.qcow2",
            "qemu-img check $DIR/leaky.qcow2",
            "qemu-img check -r leaks $DIR/leaky.qcow2",
            "qemu-img rebase -u -b $DIR/base.qcow2 $DIR/linked.qcow2",
        ],
    },
    Story {
        project: "OpenStack Nova",
        file: "nova/privsep/qemu.py, nova/virt/libvirt/utils.py (create_image, create_cow_image), driver.py (_rebase_with_qemu_img), nova/virt/disk/api.py (extend)",
        lines: &[
            "env LC_ALL=C LANG=C prlimit --as=1073741824 --cpu=30 qemu-img info $DIR/top.qcow2 --force-share --output=json",
            "env LC_ALL=C LANG=C qemu-img info $DIR/base.qcow2 --force-share --output=json -f qcow2",
            "qemu-img convert -t none -O raw -f qcow2 $DIR/base.qcow2 $DIR/base.part",
            "qemu-img convert -t writeback -O qcow2 -f qcow2 -c $DIR/top.qcow2 $DIR/snapshot.qcow2",
            "qemu-img create -f raw $DIR/ephemeral 1048576",
            "qemu-img create -f qcow2 -o backing_file=$DIR/base.raw,backing_fmt=raw,size=3145728 $DIR/disk",
            "qemu-img create -f qcow2 -o backing_file=$DIR/base.qcow2,backing_fmt=qcow2,cluster_size=65536 $DIR/disk.rescue",
            "qemu-img resize $DIR/disk 4194304",
            "qemu-img rebase -b $DIR/base.qcow2 -F qcow2 $DIR/disk",
            "qemu-img rebase -b '' $DIR/disk",
        ],
    },
];

/// The files that all stories begin with.
fn prepare(dir: &Path) {
    let data: Vec<u8> = (0..1 << 20).map(|i: u32| (i / 3000) as u8).collect();
    std::fs::write(dir.join("base.raw"), data).unwrap();
    std::fs::write(dir.join("a,b.raw"), vec![5; 1 << 20]).unwrap();
    std::fs::write(dir.join("zero.raw"), vec![0; 2 << 20]).unwrap();
    std::fs::write(dir.join("secret"), "open sesame").unwrap();
    for line in [
        "create -q -f qcow2 base.qcow2 2M",
        "create -q -f qcow2 -b base.qcow2 -F qcow2 top.qcow2 3M",
        "create -q -f qcow2 -o compat=0.10 old.qcow2 2M",
        "create -q -f qcow2 marked.qcow2 2M",
        "create -q -f qcow2 delta.qcow2 4M",
        "create -q -f qcow2 leaky.qcow2 1M",
        "bitmap --add marked.qcow2 b0",
    ] {
        run(qemu_img().current_dir(dir).args(words(line)));
    }
    for (name, line) in [
        ("base.qcow2", "write -P 1 100k 300k"),
        ("top.qcow2", "write -P 2 1M 200k"),
        ("top.qcow2", "write -z 128k 64k"),
        ("old.qcow2", "write -P 3 0 1M"),
        ("marked.qcow2", "write -P 4 64k 200k"),
        ("delta.qcow2", "write -P 6 1M 64k"),
        ("leaky.qcow2", "write -P 7 0 64k"),
    ] {
        let words = ["-f", "qcow2", "-c", line, name];
        run(Command::new("qemu-io").current_dir(dir).args(words));
    }
    // A count for a cluster that nothing refers to, within the file.
    let mut leaky = std::fs::read(dir.join("leaky.qcow2")).unwrap();
    let cluster = leaky.len() / 0x1_0000;
    leaky[0x2_0000 + 2 * cluster + 1] = 1;
    leaky.resize((cluster + 1) * 0x1_0000, 0);
    std::fs::write(dir.join("leaky.qcow2"), leaky).unwrap();
}

/// Links of QEMU's names to the command under test.
fn links() -> crate::support::Scratch {
    let dir = scratch();
    for name in ["qemu-img", "qemu-io", "qemu-nbd"] {
        symlink(program(), dir.path().join(name)).unwrap();
    }
    dir
}

/// A line's words: blanks part them but for those in single quotes.
fn shell_words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut is_quoted = false;
    for sign in line.chars() {
        match sign {
            '\'' => is_quoted = !is_quoted,
            ' ' if !is_quoted => words.push(String::new()),
            sign => words.last_mut().unwrap().push(sign),
        }
    }
    words
}

/// Runs a line in a directory, with these programs before all others.
fn run_line(line: &str, dir: &Path, programs: &Path) -> Output {
    let line = line.replace("$DIR", dir.to_str().unwrap());
    let words = shell_words(&line);
    let others = std::env::var_os("PATH").unwrap_or_default();
    let mut path = vec![programs.to_path_buf()];
    path.extend(std::env::split_paths(&others));
    let path = std::env::join_paths(path).unwrap();
    // A program is looked up in the path of the command's own environment.
    let found = Path::new("/usr/bin/env");
    let mut command = Command::new(found);
    outcome(
        command
            .env("PATH", path)
            .current_dir(dir)
            .args(words)
            .stdin(Stdio::null()),
    )
}

/// Progress, as those who show it to their users take it apart: `\((\d?\d\.\d\d)/100%\)`, and in
/// vdsm the whole text between two returns.
fn refuse_odd_progress(output: &Output, line: &str) {
    let text = String::from_utf8_lossy(&output.stdout);
    let Some(end) = text.rfind('\r') else {
        return;
    };
    for piece in text[..end].split('\r') {
        let percent = piece
            .trim()
            .strip_prefix('(')
            .and_then(|rest| rest.strip_suffix("/100%)"));
        let number: Option<f64> = percent.and_then(|percent| percent.parse().ok());
        assert!(
            number.is_some_and(|number| (0.0..=100.0).contains(&number)),
            "{line}: {piece:?}"
        );
    }
}

/// A target that could not be made stays there, and not here. Those who call remove it.
fn remove_leftovers(theirs: &Twin, ours: &Twin) {
    for file in std::fs::read_dir(&theirs.directory).unwrap() {
        let file = file.unwrap();
        if !ours.directory.join(file.file_name()).exists() {
            std::fs::remove_file(file.path()).unwrap();
        }
    }
}

#[test]
fn users_get_what_they_get_from_qemu() {
    let Some(made) = scratch_beside(&["qemu-img", "qemu-io", "qemu-nbd", "prlimit"]) else {
        return;
    };
    prepare(made.path());
    let links = links();
    let mut failures = String::new();
    for story in STORIES {
        let case = scratch();
        let (theirs, ours) = twins(made.path(), case.path(), [qemu_img, qemu_img]);
        for line in story.lines {
            // Theirs are found where they always are.
            let expected = run_line(line, &theirs.directory, Path::new("/usr/bin"));
            let got = run_line(line, &ours.directory, links.path());
            refuse_odd_progress(&got, line);
            let said = |output: &Output, twin: &Twin| {
                let directory = twin.directory.display().to_string();
                comparable(output, Layout::Free).replace(&directory, "$DIR")
            };
            let (expected, got) = (said(&expected, &theirs), said(&got, &ours));
            let context = format!("{}, {}\n{line}\n", story.project, story.file);
            if expected != got {
                failures += &format!("{context}--- expected\n{expected}\n--- actual\n{got}\n");
            }
            if expected.ends_with("Some(1)") {
                remove_leftovers(&theirs, &ours);
            }
            if let Err(why) = compare_files(&theirs, &ours, &mut Layout::Free) {
                failures += &format!("{context}{why}\n");
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
}
