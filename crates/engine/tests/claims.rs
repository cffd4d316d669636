//! Claims on files of the host, as users of the library meet them: two opens of one file exclude
//! each other within one process as they do between two.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cowslip::file::host::{CreateMode, HostGate, HostOptions, open_host_file};
use cowslip::file::{BlockFile, Claim, Sharing};
use cowslip::image::{Durability, OpenOptions};
use cowslip::qcow2::create::{CreateOptions, create};
use cowslip::{Buf, BufMut, Error, Image, Result};
use cowslip_queue::{Backend, Queue};

fn host(writable: bool) -> HostOptions {
    HostOptions {
        writable,
        ..HostOptions::default()
    }
}

fn file(path: &Path, writable: bool) -> Arc<dyn BlockFile> {
    open_host_file(path, &host(writable)).unwrap()
}

async fn open(path: &Path, writable: bool, sharing: Sharing) -> Result<Image> {
    let options = OpenOptions {
        writable,
        sharing,
        ..OpenOptions::default()
    };
    Image::open(file(path, writable), options, &HostGate::default()).await
}

async fn usual(path: &Path, writable: bool) -> Result<Image> {
    open(path, writable, Sharing::AsFormat).await
}

/// A fresh image of 1 MiB.
async fn image_in(dir: &Path) -> PathBuf {
    let path = dir.join("a.qcow2");
    let options = HostOptions {
        create: CreateMode::CreateNew,
        ..host(true)
    };
    let file = open_host_file(&path, &options).unwrap();
    create(file, None, &CreateOptions::new(1 << 20))
        .await
        .unwrap();
    path
}

fn in_scratch<F: Future<Output = ()>>(test: impl FnOnce(PathBuf) -> F) {
    let dir = tempfile::tempdir().unwrap();
    let queue = Queue::new(Backend::Auto).unwrap();
    queue.block_on(test(dir.path().to_path_buf()));
}

fn is_locked<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::Locked(_)))
}

#[test]
fn an_image_has_one_writer_or_many_readers() {
    in_scratch(|dir| async move {
        let path = image_in(&dir).await;
        let readers = [
            usual(&path, false).await.unwrap(),
            usual(&path, false).await.unwrap(),
        ];
        assert!(is_locked(usual(&path, true).await));
        drop(readers);
        let writer = usual(&path, true).await.unwrap();
        assert!(is_locked(usual(&path, true).await));
        assert!(is_locked(usual(&path, false).await));
        open(&path, false, Sharing::Forced).await.unwrap();
        let refused = open(&path, true, Sharing::Forced).await.unwrap_err();
        assert!(matches!(refused, Error::Invalid(_)), "{refused}");
        // Closing ends the claim, dropping alone does too.
        writer.close().await.unwrap();
        let writer_after = usual(&path, true).await.unwrap();
        drop((writer, writer_after));
        usual(&path, true).await.unwrap();
    });
}

#[test]
fn making_an_image_leaves_one_in_use_as_it_is() {
    in_scratch(|dir| async move {
        let path = image_in(&dir).await;
        let before = std::fs::read(&path).unwrap();
        let reader = usual(&path, false).await.unwrap();
        let made = create(file(&path, true), None, &CreateOptions::new(2 << 20)).await;
        assert!(is_locked(made));
        let truncated = HostOptions {
            create: CreateMode::Truncate,
            ..host(true)
        };
        assert!(is_locked(open_host_file(&path, &truncated)));
        assert_eq!(std::fs::read(&path).unwrap(), before);
        drop(reader);
        create(file(&path, true), None, &CreateOptions::new(2 << 20))
            .await
            .unwrap();
        assert_eq!(usual(&path, false).await.unwrap().size(), 2 << 20);
    });
}

#[test]
fn reopening_passes_the_claim_on() {
    in_scratch(|dir| async move {
        let path = image_in(&dir).await;
        let gate = HostGate::default();
        let options = |writable| OpenOptions {
            writable,
            ..OpenOptions::default()
        };
        let reader = usual(&path, false).await.unwrap();
        let writer = reader
            .reopen(file(&path, true), options(true), &gate)
            .await
            .unwrap();
        let data = Buf::copy_of(&[7; 512]);
        writer.write(0, data, Durability::Cached).await.unwrap();
        assert!(
            is_locked(usual(&path, false).await),
            "the writer's claim stands"
        );
        let handle = file(&path, false);
        let reader = writer
            .reopen(Arc::clone(&handle), options(false), &gate)
            .await
            .unwrap();
        assert_eq!(handle.claimed(), Claim::qcow2(false));
        let other = usual(&path, false).await.unwrap();
        let refused = reader.reopen(file(&path, true), options(true), &gate).await;
        assert!(is_locked(refused));
        // It was closed, and is kept: no other process writes before it is reopened.
        drop(other);
        assert!(is_locked(usual(&path, true).await));
        let again = reader
            .reopen(file(&path, false), options(false), &gate)
            .await
            .unwrap();
        let read = again.read(0, BufMut::zeroed(512)).await.unwrap();
        assert_eq!(read[..], [7; 512]);
    });
}

#[test]
fn an_image_that_is_read_is_opened_for_writing_beside_that() {
    in_scratch(|dir| async move {
        let path = image_in(&dir).await;
        let gate = HostGate::default();
        let options = OpenOptions {
            writable: true,
            ..OpenOptions::default()
        };
        let reader = usual(&path, false).await.unwrap();
        let beside = reader.open_beside(file(&path, true), options.clone(), &gate);
        let writer = beside.await.unwrap();
        // Both are there, and nobody else gets in.
        let read = reader.read(0, BufMut::zeroed(512)).await.unwrap();
        assert_eq!(read[..], [0; 512]);
        assert!(is_locked(usual(&path, true).await));
        reader.give_way().await.unwrap();
        let data = Buf::copy_of(&[7; 512]);
        writer.write(0, data, Durability::Cached).await.unwrap();
        assert!(
            is_locked(usual(&path, false).await),
            "the writer's claim stands"
        );
        let twice = writer.open_beside(file(&path, true), options, &gate);
        assert!(matches!(twice.await, Err(Error::Invalid(_))));
        writer.close().await.unwrap();
        let again = usual(&path, true).await.unwrap();
        let read = again.read(0, BufMut::zeroed(512)).await.unwrap();
        assert_eq!(read[..], [7; 512]);
    });
}

#[test]
fn the_length_of_a_raw_image_is_its_users() {
    in_scratch(|dir| async move {
        let path = dir.join("a.raw");
        std::fs::write(&path, vec![1; 4096]).unwrap();
        let [one, two] = [
            usual(&path, true).await.unwrap(),
            usual(&path, true).await.unwrap(),
        ];
        one.resize(8192).await.unwrap();
        assert!(is_locked(open(&path, false, Sharing::FixedLength).await));
        drop(one);
        let fixed = open(&path, false, Sharing::FixedLength).await.unwrap();
        assert!(is_locked(two.resize(4096).await));
        drop(fixed);
        two.resize(4096).await.unwrap();
    });
}

#[test]
fn an_image_that_is_handed_over_has_no_third_writer_and_never_two() {
    in_scratch(|dir| async move {
        let path = image_in(&dir).await;
        let before = usual(&path, true).await.unwrap();
        before
            .write(0, Buf::from(vec![7; 512]), Durability::Cached)
            .await
            .unwrap();
        let claims = before.end_session().await.unwrap();
        assert!(is_locked(usual(&path, true).await));
        let options = OpenOptions {
            writable: true,
            handed_over: claims,
            ..OpenOptions::default()
        };
        let gate = HostGate::default();
        let after = Image::open(file(&path, true), options, &gate)
            .await
            .unwrap();
        // The other one may go on: it has its claims.
        assert!(is_locked(after.ask_others()));
        drop(before);
        after.ask_others().unwrap();
        assert!(is_locked(usual(&path, true).await));
        let read = after.read(0, BufMut::zeroed(512)).await.unwrap();
        assert_eq!(read[..], [7; 512]);
        after.close().await.unwrap();
        usual(&path, true).await.unwrap();
    });
}
