//! An S3 server by others: `moto_server` of the Python package `moto[server]`.
//! `cargo nextest run -p cowslip-remote --run-ignored only moto`

use cowslip_block::options::{self, Options};
use cowslip_remote::{Environment, RemoteName, Scheme, Secrets};
use cowslip_testbed::moto::Moto;

use crate::support::{block_on, pattern, read};

#[test]
#[ignore = "needs moto_server"]
fn an_object_of_a_bucket_is_read_and_its_change_is_seen() {
    let moto = Moto::start().unwrap();
    let bytes = pattern(1_000_000, 1);
    moto.put("/images", b"").unwrap();
    moto.put("/images/golden%20image.raw", &bytes).unwrap();
    let environment = [
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_REGION", "us-east-1"),
    ];
    let environment: Environment = environment
        .into_iter()
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .collect();
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
