//! An S3 server by others: `moto_server` of the Python package `moto[server]`.
//! `cargo nextest run -p cowslip-remote --run-ignored only moto`

use std::sync::Arc;

use cowslip_block::Job;
use cowslip_block::options::{self, Options};
use cowslip_remote::object_store::ObjectStoreExt;
use cowslip_remote::{
    Environment, ObjectUrl, PART_BYTES_MIN, RemoteName, Scheme, Secrets, StoreOptions, Upload,
    Verification, locate,
};
use cowslip_testbed::moto::Moto;

use crate::support::{block_on, pattern, read};

/// Credentials that the server does not look at.
fn environment() -> Environment {
    let all = [
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_REGION", "us-east-1"),
    ];
    let all = all.into_iter();
    all.map(|(name, value)| (name.to_string(), value.to_string()))
        .collect()
}

#[test]
#[ignore = "needs moto_server"]
fn an_object_of_a_bucket_is_read_and_its_change_is_seen() {
    let moto = Moto::start().unwrap();
    let bytes = pattern(1_000_000, 1);
    moto.put("/images", b"").unwrap();
    moto.put("/images/golden%20image.raw", &bytes).unwrap();
    let environment = environment();
    let list = format!(
        "url=s3://images/golden%20image.raw,endpoint={},readahead=0",
        moto.url()
    );
    let mut options = Options::new(options::split(&list).unwrap());
    let name = RemoteName::of_options(Scheme::S3, &mut options).unwrap();
    let opened = cowslip_remote::open(&name, Secrets::default(), &environment, ("a", false));
    let file = block_on(opened).unwrap();
    assert!(read(&file, 0, bytes.len()).unwrap() == bytes);
    let opened = cowslip_remote::open(&name, Secrets::default(), &environment, ("a", false));
    let file = block_on(opened).unwrap();
    let changed = pattern(1_000_000, 2);
    moto.put("/images/golden%20image.raw", &changed).unwrap();
    let error = read(&file, 500_000, 10).unwrap_err().to_string();
    assert!(error.contains("has changed since it was opened"), "{error}");
}

#[test]
#[ignore = "needs moto_server"]
fn a_new_object_is_uploaded_in_parts_and_read_back_moto() {
    let moto = Moto::start().unwrap();
    moto.put("/images", b"").unwrap();
    let environment = environment();
    let options = StoreOptions {
        endpoint: Some(moto.url()),
        ..StoreOptions::default()
    };
    let located = |name: &str| {
        let url = ObjectUrl::of_name(name).unwrap().unwrap();
        locate(&url, &options, &environment).unwrap()
    };
    // Three parts, and one that is stored by a single request.
    for (name, len) in [
        ("s3://images/long", 20_000_000),
        ("s3://images/short", 70_000),
    ] {
        let mut bytes = pattern(len, 1);
        block_on(async {
            let location = located(name);
            let begin = || Upload::begin(&location, name, PART_BYTES_MIN);
            let mut given_up = begin().await.unwrap();
            given_up.push(&bytes).await.unwrap();
            given_up.abandon().await.unwrap();
            let mut upload = begin().await.unwrap();
            for piece in bytes.chunks(3_000_000) {
                upload.push(piece).await.unwrap();
            }
            bytes[..4].copy_from_slice(b"head");
            let way = (Verification::Bytes, &Job::default());
            let done = upload.finish(b"head", way).await.unwrap();
            assert_eq!(done.bytes, len as u64);
            let (store, path) = (Arc::clone(&location.store), location.path.clone());
            let there = async move { store.get(&path).await.unwrap().bytes().await.unwrap() };
            let there = cowslip_remote::run(there).unwrap().await;
            assert!(there[..] == bytes[..], "{name}");
            let again = begin().await.map(drop).unwrap_err().to_string();
            assert!(again.contains("exists already"), "{again}");
        });
    }
}
