//! [`Moto`]: an S3 server by others: `moto_server` of the Python package `moto[server]`.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A server that is running, and ends with this.
#[derive(Debug)]
pub struct Moto {
    child: Child,
    address: String,
}

impl Drop for Moto {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Moto {
    /// Starts a server.
    ///
    /// # Errors
    /// It is not installed (`pip install 'moto[server]'`), or does not start within a minute.
    pub fn start() -> io::Result<Moto> {
        let free = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let child = Command::new("moto_server")
            .args(["-H", "127.0.0.1", "-p", &free.port().to_string()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| {
                let text = format!("moto_server: {error}: pip install 'moto[server]'");
                io::Error::new(error.kind(), text)
            })?;
        let moto = Moto {
            child,
            address: free.to_string(),
        };
        let begun = Instant::now();
        while TcpStream::connect(&moto.address).is_err() {
            if begun.elapsed() > Duration::from_secs(60) {
                return Err(io::Error::other("moto_server does not start"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(moto)
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Makes a bucket, or an object in one: `/bucket/name`.
    ///
    /// # Errors
    /// The server refuses it.
    pub fn put(&self, path: &str, body: &[u8]) -> io::Result<()> {
        let address = &self.address;
        let mut stream = TcpStream::connect(address)?;
        let head = format!(
            "PUT {path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: {}\r\n\
             Authorization: AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request\r\n\
             Connection: close\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(body)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        match answer.starts_with("HTTP/1.1 200") {
            true => Ok(()),
            false => Err(io::Error::other(answer)),
        }
    }
}
