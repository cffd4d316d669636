//! A web server by others: nginx.
//! `cargo nextest run -p cowslip-remote --run-ignored only nginx`

use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{block_on, open_url, pattern, read};
use cowslip_block::file::BlockFile;

struct Nginx {
    child: Child,
    url: String,
}

impl Drop for Nginx {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Serves the files of a directory, by one process.
fn start(dir: &Path) -> Nginx {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let shown = dir.display();
    let places = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let places = places.map(|name| format!("{name}_temp_path {shown}/{name};"));
    let configuration = format!(
        "daemon off; master_process off; pid {shown}/pid; error_log {shown}/errors;\n\
         events {{}}\n\
         http {{ access_log off; {}\n\
         server {{ listen {address}; root {shown}/files; }} }}\n",
        places.concat()
    );
    let path = dir.join("configuration");
    std::fs::write(&path, configuration).unwrap();
    let child = Command::new("nginx")
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .arg("-e")
        .arg(dir.join("errors"))
        .arg("-c")
        .arg(&path)
        .stderr(Stdio::null())
        .spawn()
        .expect("nginx is installed");
    let nginx = Nginx {
        child,
        url: format!("http://{address}"),
    };
    let begun = Instant::now();
    while TcpStream::connect(address).is_err() {
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "it does not start"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    nginx
}

#[test]
#[ignore = "needs nginx"]
fn files_are_read_and_cached_and_a_change_is_seen_nginx() {
    let dir = tempfile::tempdir().unwrap();
    let files = dir.path().join("files");
    std::fs::create_dir(&files).unwrap();
    let (old, new) = (pattern(3_000_000, 1), pattern(3_000_000, 2));
    std::fs::write(files.join("golden image.raw"), &old).unwrap();
    let nginx = start(dir.path());
    let url = format!("{}/golden%20image.raw", nginx.url);
    let cache = format!("cache-dir={}/cache", dir.path().display());
    for (options, fetches) in [("", true), (&cache, true), (&cache, false)] {
        let file = open_url(&url, options).unwrap();
        assert!(read(&file, 0, old.len()).unwrap() == old);
        assert!(read(&file, 1_234_567, 4096).unwrap() == old[1_234_567..][..4096]);
        assert_eq!(file.fetched_bytes() >= old.len() as u64, fetches);
        block_on(file.close()).unwrap();
    }
    let file = open_url(&url, "readahead=0").unwrap();
    // Its ETag is made of the time in seconds and the length.
    std::thread::sleep(Duration::from_millis(1100));
    std::fs::write(files.join("golden image.raw"), &new).unwrap();
    let error = read(&file, 2_000_000, 10).unwrap_err().to_string();
    assert!(error.contains("has changed since it was opened"), "{error}");
    let file = open_url(&url, &cache).unwrap();
    assert!(read(&file, 0, new.len()).unwrap() == new);
}
