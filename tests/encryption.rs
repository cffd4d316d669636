//! Encrypted images beside QEMU: what either writes the other reads, and both say the same of it.
//!
//! Key slots are cheap to open here (`iter-time=10`), or a test would wait for PBKDF2. QEMU
//! measures for two seconds how fast it is whenever it makes a header, so it makes few of them.
//!
//! Deliberate differences: `check`, `info` and `snapshot -l` need no key; compressed clusters,
//! which would not be encrypted, are refused; space that is preallocated reads as zeroes, where
//! QEMU's decrypts to anything.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::path::Path;

use crate::support::golden::{self, words};
use crate::support::rng::Rng;
use crate::support::whose::Whose;
use crate::support::{outcome, peers_are_installed, run, scratch, scratch_beside};

mod keys;

const KEY: [&str; 2] = ["--object", "secret,id=s,data=hunter2"];
const QCOW2_KEYS: &str = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
const LUKS_KEYS: &str = "key-secret=s,iter-time=10";
const AES_KEYS: &str = "encrypt.format=aes,encrypt.key-secret=s";
const DISK_BYTES: usize = 1 << 20;

/// Returns the options that open `file` with its key. "aes" is qcow2 with QEMU's old encryption.
fn opened(format: &str, file: &str) -> String {
    let option = match format {
        "luks" => "key-secret",
        _ => "encrypt.key-secret",
    };
    format!("driver={},file.filename={file},{option}=s", driver(format))
}

fn driver(format: &str) -> &str {
    match format {
        "aes" => "qcow2",
        other => other,
    }
}

impl Whose {
    fn img(self, dir: &Path, line: &str) -> String {
        let mut line = words(line);
        line.splice(1..1, KEY);
        run(self.program_in("qemu-img", dir).args(line))
    }

    fn io(self, dir: &Path, image: &str, commands: &[String]) -> String {
        let mut program = self.program_in("qemu-io", dir);
        program
            .args(KEY)
            .args(["--image-opts", image, "-d", "unmap"]);
        for command in commands {
            program.args(["-c", command]);
        }
        run(&mut program)
    }

    /// All bytes of a disk.
    fn disk(self, dir: &Path, image: &str) -> Vec<u8> {
        let line = format!("convert --image-opts -O raw {image} all.raw");
        self.img(dir, &line);
        std::fs::read(dir.join("all.raw")).unwrap()
    }
}

fn keys_of(format: &str) -> &'static str {
    match format {
        "qcow2" => QCOW2_KEYS,
        "aes" => AES_KEYS,
        _ => LUKS_KEYS,
    }
}

/// Formats and options beside those of the key.
const SHAPES: &[(&str, &str)] = &[
    ("luks", "hash-alg=sha1"),
    ("luks", "cipher-alg=aes-128,cipher-mode=cbc,ivgen-alg=essiv"),
    ("luks", "cipher-mode=cbc,ivgen-alg=plain,hash-alg=sha512"),
    ("qcow2", "encrypt.cipher-alg=aes-192"),
    ("qcow2", "cluster_size=512,encrypt.hash-alg=sha512"),
    ("qcow2", "compat=0.10,encrypt.cipher-mode=cbc"),
    ("qcow2", "extended_l2=on,preallocation=metadata"),
    ("qcow2", "data_file=data,preallocation=metadata"),
    ("qcow2", "cluster_size=4k,preallocation=falloc"),
    ("aes", "cluster_size=512"),
    ("aes", "compat=0.10,cluster_size=4k"),
    ("aes", "extended_l2=on,preallocation=metadata"),
    ("aes", "data_file=data"),
    ("aes", "cluster_size=64k"),
];

/// Some writes of any place and length, also in the disk's bytes.
fn writes(rng: &mut Rng, disk: &mut [u8]) -> Vec<String> {
    let mut commands = Vec::new();
    for _ in 0..6 {
        let len = match rng.below(3) {
            0 => 1 + rng.below(3000),
            1 => 512 * (1 + rng.below(40)),
            _ => 1 + rng.below(200_000),
        };
        let start = rng.below(disk.len() as u64 - len);
        let part = &mut disk[start as usize..(start + len) as usize];
        match rng.below(4) {
            0 => {
                part.fill(0);
                let unmap = *rng.pick(&["", "-u "]);
                commands.push(format!("write -z {unmap}{start} {len}"));
            }
            _ => {
                let byte = 1 + rng.below(255) as u8;
                part.fill(byte);
                commands.push(format!("write -P {byte} {start} {len}"));
            }
        }
    }
    commands
}

#[test]
fn both_programs_change_an_image_in_turn() {
    if !peers_are_installed(&["qemu-img", "qemu-io"]) {
        return;
    }
    for (index, (format, options)) in SHAPES.iter().enumerate() {
        let makers = match index % 4 {
            0 => &Whose::BOTH[..],
            _ => &Whose::BOTH[..1],
        };
        for &maker in makers {
            let dir = scratch();
            let mut rng = Rng::named(index as u64, options);
            let keys = keys_of(format);
            let line = format!(
                "create -q -f {} -o {keys},{options} image {DISK_BYTES}",
                driver(format)
            );
            maker.img(dir.path(), &line);
            let image = opened(format, "image");
            let mut disk = vec![0; DISK_BYTES];
            if maker == Whose::Theirs && (*format == "luks" || options.contains("prealloc")) {
                // Anything, so that both have to see the same.
                disk = Whose::Theirs.disk(dir.path(), &image);
            } else if *format == "luks" {
                disk = Whose::Ours.disk(dir.path(), &image);
            }
            for turn in 0..4 {
                let writer = Whose::BOTH[turn % 2];
                let commands = writes(&mut rng, &mut disk);
                writer.io(dir.path(), &image, &commands);
                for reader in Whose::BOTH {
                    let what = format!(
                        "{format} {options}, made by {maker:?}: {commands:?} of {writer:?}"
                    );
                    assert!(
                        reader.disk(dir.path(), &image) == disk,
                        "{reader:?}: {what}"
                    );
                }
            }
            if driver(format) == "qcow2" {
                let checked = Whose::Theirs.img(dir.path(), &format!("check --image-opts {image}"));
                assert!(checked.contains("No errors"), "{options}: {checked}");
                run(Whose::Ours
                    .program_in("qemu-img", dir.path())
                    .args(["check", "image"]));
            }
        }
    }
}

#[test]
fn nothing_is_in_the_file_as_it_is_on_the_disk() {
    for (format, options) in SHAPES {
        let dir = scratch();
        let keys = keys_of(format);
        let line = format!(
            "create -q -f {} -o {keys},{options} image {DISK_BYTES}",
            driver(format)
        );
        Whose::Ours.img(dir.path(), &line);
        let commands = [
            "write -P 0x5a 0 300000",
            "write -P 0x5a 700003 40",
            "write -z 4096 3000",
        ];
        let image = opened(format, "image");
        Whose::Ours.io(dir.path(), &image, &commands.map(str::to_string));
        for file in ["image", "data"] {
            let bytes = std::fs::read(dir.path().join(file)).unwrap_or_default();
            let run = bytes.chunk_by(|a, b| a == b).filter(|run| run[0] == 0x5a);
            let longest = run.map(<[u8]>::len).max().unwrap_or(0);
            assert!(
                longest < 16,
                "{options}: {longest} bytes of the guest's in {file}"
            );
        }
    }
}

/// Chains, snapshots, sizes: the verbs that move a disk's bytes to other places.
#[test]
fn clusters_are_encrypted_anew_where_they_go() {
    if !peers_are_installed(&["qemu-img", "qemu-io"]) {
        return;
    }
    let ways = [QCOW2_KEYS, AES_KEYS];
    for (whose, keys) in Whose::BOTH
        .map(|whose| ways.map(|keys| (whose, keys)))
        .as_flattened()
    {
        let whose = *whose;
        let dir = &scratch();
        let base = opened("qcow2", "base");
        let over = format!("{},backing.encrypt.key-secret=s", opened("qcow2", "over"));
        whose.img(dir, &format!("create -q -f qcow2 -o {keys} base 1M"));
        let io = |image: &str, line: &str| drop(whose.io(dir, image, &[line.to_string()]));
        io(&base, "write -P 1 0 500k");
        let create = format!("create -q -f qcow2 -u -o {keys} -b base -F qcow2 over 1M");
        whose.img(dir, &create);
        io(&over, "write -P 2 100001 1000");
        whose.img(dir, &format!("snapshot --image-opts -c one {over}"));
        io(&over, "write -P 3 100500 1000");
        io(&over, "write -P 4 900k 10k");
        let before = whose.disk(dir, &over);
        let other = Whose::BOTH[usize::from(whose == Whose::Ours)];
        assert!(other.disk(dir, &over) == before, "{whose:?}");
        whose.img(dir, &format!("snapshot --image-opts -a one {over}"));
        whose.img(dir, &format!("snapshot --image-opts -d one {over}"));
        whose.img(dir, &format!("resize -q --image-opts {over} 1100k"));
        whose.img(dir, &format!("commit -q --image-opts {over}"));
        let mut disk = vec![0; 1100 << 10];
        disk[..500 << 10].fill(1);
        disk[100_001..101_001].fill(2);
        for reader in Whose::BOTH {
            assert!(
                reader.disk(dir, &over) == disk,
                "{reader:?} after {whose:?}"
            );
            assert!(
                reader.disk(dir, &base)[..1 << 20] == disk[..1 << 20],
                "{reader:?}"
            );
        }
        whose.img(
            dir,
            &format!("resize -q --preallocation=metadata --image-opts {base} 2M"),
        );
        io(&base, "write -P 5 1200k 1000");
        if whose == Whose::Ours {
            let mut disk = disk;
            disk.resize(2 << 20, 0);
            disk[1200 << 10..][..1000].fill(5);
            assert!(
                other.disk(dir, &base) == disk,
                "what is preallocated reads as zeroes"
            );
        }
        whose.img(dir, &format!("check --image-opts {base}"));
    }
}

#[test]
fn conversions_go_into_and_out_of_encryption() {
    let Some(dir) = &scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    let mut rng = Rng::new(5);
    let mut plain = vec![0; DISK_BYTES];
    plain[4096..70_000]
        .copy_from_slice(&(4096..70_000).map(|_| rng.next() as u8).collect::<Vec<_>>());
    plain[800_000..].fill(9);
    std::fs::write(dir.join("plain"), &plain).unwrap();
    let formats = ["luks", "qcow2", "aes"];
    for format in formats {
        let keys = keys_of(format);
        let image = opened(format, "image");
        Whose::Ours.img(
            dir,
            &format!("convert -f raw -O {} -o {keys} plain image", driver(format)),
        );
        for reader in Whose::BOTH {
            assert!(reader.disk(dir, &image) == plain, "{format} {reader:?}");
        }
        for other in formats {
            let keys = keys_of(other);
            let line = format!(
                "convert --image-opts -O {} -o {keys} {image} copy",
                driver(other)
            );
            Whose::Ours.img(dir, &line);
            let copy = opened(other, "copy");
            Whose::Theirs.img(dir, &format!("compare --image-opts {image} {copy}"));
            Whose::Ours.img(dir, &format!("compare --image-opts {image} {copy}"));
        }
    }
}

/// Command lines on an encrypted image, and on images that cannot be encrypted.
const LINES: &str = "
info image
info --output=json image
info --backing-chain over
info volume
info --output=json volume
info odd
info --output=json odd-volume
map image
map --image-opts driver=qcow2,file.filename=image,encrypt.key-secret=s
map --output=json --image-opts driver=qcow2,file.filename=image,encrypt.key-secret=s
map --output=json --image-opts driver=luks,file.filename=volume,key-secret=s
map --image-opts driver=qcow2,file.filename=image,encrypt.key-secret=wrong
map --image-opts driver=qcow2,file.filename=image,encrypt.key-secret=none
map --image-opts driver=luks,file.filename=volume,key-secret=wrong
map --output=json over
info old
info --output=json old
map old
map --image-opts driver=qcow2,file.filename=old,encrypt.key-secret=s
map --image-opts driver=qcow2,file.filename=old,encrypt.key-secret=s,encrypt.format=aes
map --output=json --image-opts driver=qcow2,file.filename=old,encrypt.key-secret=wrong
map --image-opts driver=qcow2,file.filename=old,encrypt.key-secret=none
map --image-opts driver=qcow2,file.filename=old,encrypt.key-secret=s,encrypt.format=luks
map --image-opts driver=qcow2,file.filename=image,encrypt.key-secret=s,encrypt.format=aes
map --image-opts driver=qcow2,file.filename=image,encrypt.key-secret=s,encrypt.format=foo
map --image-opts driver=qcow2,file.filename=unencrypted,encrypt.key-secret=s,encrypt.format=luks
map --image-opts driver=raw,file.filename=plain,encrypt.format=luks
map --image-opts driver=qcow2,file.filename=unencrypted,encrypt.key-secret=s
amend -o encrypt.state=active,encrypt.new-secret=s old
amend --image-opts -o encrypt.state=active,encrypt.new-secret=s driver=qcow2,file.filename=old,encrypt.key-secret=s
amend --image-opts -o encrypt.state=active driver=qcow2,file.filename=old,encrypt.key-secret=s
amend --image-opts -o encrypt.format=luks driver=qcow2,file.filename=old,encrypt.key-secret=s
amend --image-opts -o encryption=off driver=qcow2,file.filename=old,encrypt.key-secret=s
convert -O qcow2 -c -o encryption=on,encrypt.key-secret=s plain x
convert -O qcow2 -c -o encryption=off plain x
create -f qcow2 -o encryption=on x 1M
create -f qcow2 -o encryption=foo x 1M
create -f qcow2 -o encryption=off x 1M
create -f qcow2 -o encryption=off,encrypt.key-secret=s x 1M
create -f qcow2 -o encryption=on,encrypt.key-secret=s x 1M
create -f qcow2 -o encryption=on,encrypt.key-secret=s,compat=0.10 x 1M
create -f qcow2 -o encryption=on,encrypt.key-secret=none x 1M
create -f qcow2 -o encryption=on,encrypt.format=aes,encrypt.key-secret=s x 1M
create -f qcow2 -o encrypt.format=aes x 1M
create -f qcow2 -o encrypt.format=aes,encrypt.key-secret=s x 1M
create -f qcow2 -o encrypt.format=aes,encrypt.key-secret=s,encrypt.cipher-alg=aes-128 x 1M
create -f qcow2 -o encrypt.format=aes,encrypt.key-secret=s,encrypt.iter-time=10 x 1M
measure -O qcow2 -o encryption=on --size 1G
measure -O qcow2 -o encrypt.format=aes --size 1G
convert -O raw volume x
convert -O raw over x
convert -O qcow2 -c -o encrypt.format=luks,encrypt.key-secret=s plain x
convert -O luks -c -o key-secret=s plain x
convert -O luks plain x
resize image 9M
snapshot -c a image
amend -o compat=0.10 image
amend -f luks -o help
amend --image-opts -o help driver=luks,file.filename=volume,key-secret=s
amend -f luks -o state=active,new-secret=s volume
amend -o encrypt.state=active,encrypt.new-secret=s image
amend -o encrypt.state=active,encrypt.new-secret=s over
amend -f luks -o size=2M,state=active volume
check --image-opts driver=qcow2,file.filename=nosuch,encrypt.key-secret=s
compare image image
create -f qcow2 -o encrypt.format=luks x 1M
create -f qcow2 -o encrypt.format=luks,encrypt.key-secret=none x 1M
create -f qcow2 -o encrypt.format=foo,encrypt.key-secret=s x 1M
create -f qcow2 -o encrypt.format=luks,encrypt.key-secret=s,encryption=on x 1M
create -f qcow2 -o encrypt.key-secret=s x 1M
create -f qcow2 -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=x x 1M
create -f qcow2 -o encrypt.format=luks,encrypt.key-secret=s,encrypt.foo=x x 1M
create -f luks x 1M
create -f luks -o key-secret=none x 1M
create -f luks -b plain -F raw x 1M
create -f luks -o key-secret=s,foo=1 x 1M
create -f luks -o help
create -f luks -o help x
measure -O luks --size 1G
measure -O luks -o key-secret=s,cipher-alg=aes-128 --size 1000M
measure -O qcow2 -o encrypt.format=luks --size 1G
measure -O qcow2 -o encrypt.format=luks,encrypt.key-secret=s,cluster_size=4k plain
info --object secret,id=s,data=again plain
info --object secret,data=x plain
info --object secret,id=2,data=x plain
info --object secret,id=t plain
info --object secret,id=t,data=x,file=plain plain
info --object secret,id=t,data=x,format=hex plain
info --object secret,id=t,data=?,format=base64 plain
info --object secret,id=t,data=x,foo=1 plain
info --object foo,id=t plain
info --object id=t,data=x plain
info --object secret,id=t,file=nosuch plain
";

#[test]
fn encrypted_images_are_told_of_in_qemus_words() {
    let Some(dir) = &scratch_beside(&["qemu-img", "qemu-io"]) else {
        return;
    };
    let make = |line: &str| drop(Whose::Ours.img(dir, line));
    make(&format!("create -q -f qcow2 -o {QCOW2_KEYS} image 8M"));
    make(&format!("create -q -f luks -o {LUKS_KEYS} volume 8M"));
    let odd = "cipher-mode=cbc,ivgen-alg=essiv,cipher-alg=aes-128";
    make(&format!(
        "create -q -f luks -o {LUKS_KEYS},{odd} odd-volume 8M"
    ));
    let odd = "encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv,compat=0.10";
    make(&format!("create -q -f qcow2 -o {QCOW2_KEYS},{odd} odd 8M"));
    make("create -q -f qcow2 -b image -F qcow2 over 8M");
    make(&format!("create -q -f qcow2 -o {AES_KEYS} old 8M"));
    make("create -q -f qcow2 unencrypted 8M");
    make("create -q -f raw plain 1M");
    let mut failures = String::new();
    for line in golden::lines(LINES) {
        let mut line = words(line);
        line.splice(1..1, ["--object", "secret,id=wrong,data=hunter3"]);
        line.splice(1..1, KEY);
        let said = |whose: Whose| {
            drop(std::fs::remove_file(dir.join("x")));
            golden::said(&outcome(whose.program_in("qemu-img", dir).args(&line)))
        };
        let (ours, theirs) = (said(Whose::Ours), said(Whose::Theirs));
        if ours != theirs {
            failures += &format!("{line:?}\n--- expected\n{theirs}--- actual\n{ours}");
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let dir = &scratch();
    Whose::Ours.img(dir, &format!("create -q -f qcow2 -o {QCOW2_KEYS} image 1M"));
    Whose::Ours.img(dir, &format!("create -q -f luks -o {LUKS_KEYS} volume 1M"));
    std::fs::write(dir.join("plain"), [1; 4096]).unwrap();
    let create = format!("create -f qcow2 -o {QCOW2_KEYS}");
    for (line, said) in [
        (
            format!("{create},encrypt.cipher-alg=serpent-256 x 1M"),
            "'cipher-alg' does not accept value 'serpent-256'",
        ),
        (
            format!("{create},encrypt.hash-alg=ripemd160 x 1M"),
            "'hash-alg' does not accept value 'ripemd160'",
        ),
        (
            format!("{create},encrypt.cipher-mode=ctr x 1M"),
            "'cipher-mode' does not accept value 'ctr'",
        ),
        (
            format!("{create},encrypt.ivgen-alg=essiv x 1M"),
            "ivgen-alg 'essiv' is supported with cipher-mode 'cbc'",
        ),
        (
            format!("{create},encrypt.cipher-alg=aes-192,encrypt.cipher-mode=cbc x 1M"),
            "cipher-alg 'aes-192' is supported",
        ),
        (
            format!("{create},compat=0.10,preallocation=metadata x 1M"),
            "Preallocation of an encrypted image",
        ),
        (
            format!("create -f luks -o {LUKS_KEYS},detached-header=on x 1M"),
            "detached-header is not supported",
        ),
        (
            "dd if=plain of=x -f raw -O luks".to_string(),
            "'key-secret' is required",
        ),
        (
            "info --object secret,id=t,data=x,keyid=s,iv=x image".to_string(),
            "('keyid') are not supported",
        ),
    ] {
        let mut line = words(&line);
        line.splice(1..1, KEY);
        let refused = outcome(Whose::Ours.program_in("qemu-img", dir).args(&line));
        let text = golden::said(&refused);
        assert_eq!(refused.status.code(), Some(1), "{line:?}: {text}");
        assert!(text.contains(said), "{line:?}: {text}");
        assert!(!dir.join("x").exists(), "{line:?}");
    }
}

/// The format keeps them as they are, for everybody to read.
#[test]
fn compressed_clusters_are_refused_in_encrypted_images() {
    let dir = &scratch();
    let image = opened("qcow2", "image");
    for keys in [QCOW2_KEYS, AES_KEYS] {
        Whose::Ours.img(dir, &format!("create -q -f qcow2 -o {keys} image 1M"));
        let mut io = Whose::Ours.program_in("qemu-io", dir);
        io.args(KEY)
            .args(["--image-opts", &image, "-c", "write -c 0 64k"]);
        let said = golden::said(&outcome(&mut io));
        assert!(said.contains("not supported"), "{keys}: {said}");
    }
}

#[test]
fn a_passphrase_that_opens_nothing_and_ends_with_a_line_end_is_reported_with_that() {
    let dir = &scratch();
    std::fs::write(dir.join("key"), "hunter2\n").unwrap();
    for (format, keys) in [("qcow2", QCOW2_KEYS), ("luks", LUKS_KEYS)] {
        Whose::Ours.img(dir, &format!("create -q -f {format} -o {keys} image 1M"));
        let read = |secret: &str| {
            let mut io = Whose::Ours.program_in("qemu-io", dir);
            io.args(["--object", secret, "--image-opts", &opened(format, "image")]);
            golden::said(&outcome(io.args(["-r", "-c", "read -q 0 512"])))
        };
        let hinted = read("secret,id=s,file=key");
        let wrong = "Invalid password, cannot unlock any keyslot";
        let hint = format!("{wrong} (it ends with a line end, which is a part of it)\n");
        assert!(hinted.contains(&hint), "{hinted}");
        let plain = read("secret,id=s,data=hunter");
        assert!(plain.contains(&format!("{wrong}\n")), "{plain}");
        let opens = read("secret,id=s,data=hunter2");
        assert_eq!(opens, "[exit status: 0]\n");
    }
}

/// Headers whose opening would take very long, or that point outside of their areas.
#[test]
fn hostile_headers_are_errors_that_name_their_place() {
    let dir = &scratch();
    Whose::Ours.img(dir, &format!("create -q -f qcow2 -o {QCOW2_KEYS} image 1M"));
    Whose::Ours.img(
        dir,
        &format!("create -q -f luks -o {LUKS_KEYS} image.luks 1M"),
    );
    let keys_at = 0x40000;
    let most = u32::MAX.to_be_bytes();
    for (at, bytes, said) in [
        (212, &most[..], "4294967295 iterations"),
        (164, &most, "4294967295 iterations"),
        (252, &most, "has 4294967295 stripes"),
        (248, &most, "key slot 0"),
        (108, &most, "a key of 4294967295 bytes"),
        (0, &[0], "not in LUKS format"),
        (208, &most, "neither active nor inactive"),
    ] {
        for (name, start) in [("image", keys_at), ("image.luks", 0)] {
            let mut image = std::fs::read(dir.join(name)).unwrap();
            image[start + at..][..bytes.len()].copy_from_slice(bytes);
            std::fs::write(dir.join("bad"), image).unwrap();
            let format = if start == 0 { "luks" } else { "qcow2" };
            let mut map = Whose::Ours.program_in("qemu-img", dir);
            map.arg("map")
                .args(KEY)
                .args(["--image-opts", &opened(format, "bad")]);
            let mut info = Whose::Ours.program_in("qemu-img", dir);
            info.args(["info", "-f", format, "bad"]);
            for mut program in [map, info] {
                let refused = outcome(&mut program);
                let text = golden::said(&refused);
                assert_eq!(refused.status.code(), Some(1), "{name} {at}: {text}");
                assert!(
                    text.contains(said) && text.contains("bad"),
                    "{name} {at}: {text}"
                );
            }
        }
    }
    // Where the header is said to be.
    let image = std::fs::read(dir.join("image")).unwrap();
    let pointer = image[..4096]
        .windows(4)
        .position(|four| four == [0x05, 0x37, 0xbe, 0x77])
        .unwrap()
        + 8;
    for place in [
        [u64::MAX, 1 << 20],
        [0x40000, 100],
        [0x40000, u64::MAX],
        [1 << 40, 1 << 20],
    ] {
        let mut image = image.clone();
        image[pointer..pointer + 16].copy_from_slice(&place.map(u64::to_be_bytes).concat());
        std::fs::write(dir.join("bad"), image).unwrap();
        let mut map = Whose::Ours.program_in("qemu-img", dir);
        let refused = outcome(
            map.arg("map")
                .args(KEY)
                .args(["--image-opts", &opened("qcow2", "bad")]),
        );
        assert_eq!(
            refused.status.code(),
            Some(1),
            "{place:x?}: {}",
            golden::said(&refused)
        );
    }
}
