//! Hostile and honest names under each policy.

use std::os::unix::fs::symlink;

use super::*;
use crate::file::{ChosenBy, Gate};
use crate::host::{HostGate, HostOptions};

/// `images/a.qcow2` and what lies around it.
fn scratch() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    fs::create_dir_all(root.join("images/sub")).unwrap();
    fs::create_dir(root.join("images-of-others")).unwrap();
    for name in [
        "secret",
        "images/a.qcow2",
        "images/b.raw",
        "images/sub/c.raw",
        "images-of-others/d.raw",
    ] {
        fs::write(root.join(name), name).unwrap();
    }
    symlink("b.raw", root.join("images/inside")).unwrap();
    symlink("../secret", root.join("images/outside")).unwrap();
    symlink("/dev/zero", root.join("images/device")).unwrap();
    symlink("..", root.join("images/sub/up")).unwrap();
    symlink("images", root.join("link")).unwrap();
    dir
}

fn open(policy: BackingPolicy, image: &Path, name: &str) -> Result<String> {
    let gate = HostGate {
        options: HostOptions::default(),
        policy,
    };
    let request = FileRequest {
        named_by: image.to_str().unwrap(),
        name,
        role: Role::Backing,
        writable: false,
        chosen_by: ChosenBy::Image,
    };
    gate.open(&request).map(|file| file.name().to_string())
}

#[test]
fn files_beside_the_image_and_below_it_are_opened() {
    let dir = scratch();
    let image = dir.path().join("images/a.qcow2");
    let absolute = dir.path().join("images/b.raw");
    let by_link = dir.path().join("link/b.raw");
    let honest = [
        "b.raw",
        "./b.raw",
        &format!("file:{}", absolute.display()),
        "sub/c.raw",
        "sub/../b.raw",
        "sub/up/b.raw",
        "inside",
        absolute.to_str().unwrap(),
        by_link.to_str().unwrap(),
    ];
    for name in honest {
        open(BackingPolicy::SameDirectory, &image, name).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    // The image itself may be reached by a link; its directory is where that leads.
    let image = dir.path().join("link/a.qcow2");
    open(BackingPolicy::SameDirectory, &image, "b.raw").unwrap();
}

#[test]
fn files_elsewhere_are_not() {
    let dir = scratch();
    let image = dir.path().join("images/a.qcow2");
    let secret = dir.path().join("secret");
    let hostile = [
        // It is relative to the current directory.
        "file:b.raw",
        "../secret",
        "sub/../../secret",
        "sub/up/../secret",
        "../images-of-others/d.raw",
        "outside",
        "device",
        "/dev/zero",
        "/etc/passwd",
        "/proc/self/mem",
        "/no/such/file",
        "../no-such-file",
        "file:../secret",
        "..",
        secret.to_str().unwrap(),
    ];
    for name in hostile {
        let error = open(BackingPolicy::SameDirectory, &image, name).unwrap_err();
        assert!(matches!(error, Error::Forbidden(_)), "{name}: {error}");
    }
    let error = open(BackingPolicy::SameDirectory, &image, "../secret").unwrap_err();
    let (image, images) = (image.display(), dir.path().join("images"));
    let images = images.canonicalize().unwrap();
    assert_eq!(
        error.to_string(),
        format!(
            "'{image}' names '../secret' as its backing file, and the backing policy \
             'same-directory' forbids that: it is not in '{}'; if the image is trusted, open it \
             with the policy 'any'",
            images.display()
        )
    );
}

#[test]
fn missing_files_and_protocols_are_refused_as_before() {
    let dir = scratch();
    let image = dir.path().join("images/a.qcow2");
    for policy in [BackingPolicy::Any, BackingPolicy::SameDirectory] {
        let error = open(policy, &image, "missing").unwrap_err();
        assert!(
            error.to_string().ends_with("No such file or directory"),
            "{error}"
        );
        for name in ["nbd://host/x", "json:{\"driver\":\"file\"}", "fd:3"] {
            let error = open(policy, &image, name).unwrap_err();
            assert!(
                matches!(error, Error::Unsupported { .. }),
                "{name}: {error}"
            );
        }
    }
}

#[test]
fn none_opens_only_what_the_caller_names() {
    let dir = scratch();
    let image = dir.path().join("images/a.qcow2");
    for name in ["b.raw", "/dev/zero", "nbd://host/x", "missing"] {
        let error = open(BackingPolicy::None, &image, name).unwrap_err();
        assert!(matches!(error, Error::Forbidden(_)), "{name}: {error}");
    }
    let gate = HostGate {
        policy: BackingPolicy::None,
        ..HostGate::default()
    };
    let request = FileRequest {
        named_by: image.to_str().unwrap(),
        name: "../secret",
        role: Role::Data,
        writable: false,
        chosen_by: ChosenBy::Caller,
    };
    gate.open(&request).unwrap();
}

#[test]
fn a_name_that_changes_after_it_was_looked_up_is_refused() {
    let dir = scratch();
    let image = dir.path().join("images/a.qcow2");
    let path = dir.path().join("images/b.raw");
    let path = path.to_str().unwrap();
    let request = FileRequest {
        named_by: image.to_str().unwrap(),
        name: "b.raw",
        role: Role::Backing,
        writable: false,
        chosen_by: ChosenBy::Image,
    };
    let beneath = Beneath::find(&request, path).unwrap();
    fs::remove_file(path).unwrap();
    symlink("../secret", path).unwrap();
    let errno = beneath.open(OFlags::RDONLY).unwrap_err();
    let error = Beneath::refused(&request, path, errno);
    assert!(matches!(error, Error::Forbidden(_)), "{error}");
}
