//! An S3 server by others: `moto_server` of the Python package `moto[server]`.
//! `cargo nextest run -p cowslip-remote --run-ignored only moto`

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cowslip_block::options::{self, Options};
use cowslip_remote::{Environment, RemoteName, Scheme, Secrets};

use crate::support::{block_on, pattern, read};

struct Moto {
    child: Child,
    address: String,
}

impl Drop for Moto {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn start() -> Moto {
    let free = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let child = Command::new("moto_server")
        .args(["-H", "127.0.0.1", "-p", &free.port().to_string()])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("moto_server is installed: pip install 'moto[server]'");
    let moto = Moto {
        child,
        address: free.to_string(),
    };
    let begun = Instant::now();
    while TcpStream::connect(&moto.address).is_err() {
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "it does not start"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    moto
}

fn put(address: &str, path: &str, body: &[u8]) {
    let mut stream = TcpStream::connect(address).unwrap();
    let head = format!(
        "PUT {path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: {}\r\n\
         Authorization: AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[test]
#[ignore = "needs moto_server"]
fn an_object_of_a_bucket_is_read_and_its_change_is_seen() {
    let moto = start();
    let bytes = pattern(1_000_000, 1);
    put(&moto.address, "/images", b"");
    put(&moto.address, "/images/golden%20image.raw", &bytes);
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
        "url=s3://images/golden%20image.raw,endpoint=http://{},readahead=0",
        moto.address
    );
    let mut options = Options::new(options::split(&list).unwrap());
    let name = RemoteName::of_options(Scheme::S3, &mut options).unwrap();
    let opened = cowslip_remote::open(&name, Secrets::default(), &environment, ("a", false));
    let file = block_on(opened).unwrap();
    assert!(read(&file, 0, bytes.len()).unwrap() == bytes);
    let opened = cowslip_remote::open(&name, Secrets::default(), &environment, ("a", false));
    let file = block_on(opened).unwrap();
    put(
        &moto.address,
        "/images/golden%20image.raw",
        &pattern(1_000_000, 2),
    );
    let error = read(&file, 500_000, 10).unwrap_err().to_string();
    assert!(error.contains("has changed since it was opened"), "{error}");
}
