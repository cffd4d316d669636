//! A golden image on a web server, and command lines about it.

use std::path::Path;
use std::process::Command;

use cowslip_testbed::web::{WebObject, WebServer};

use super::{Scratch, cowslip, run, scratch};

/// An image of 4 MiB, locally as `golden.qcow2` and on a server.
pub struct Golden {
    dir: Scratch,
    pub server: WebServer,
    /// Its path on the server.
    at: &'static str,
}

impl Golden {
    /// One that is made by these words for `io`.
    pub fn new(at: &'static str, writes: &str) -> Golden {
        let (dir, server) = (scratch(), WebServer::start().unwrap());
        let golden = Golden { dir, server, at };
        run(&mut golden.command("create -q -f qcow2 golden.qcow2 4M"));
        run(&mut golden.command(&format!("io {writes} golden.qcow2")));
        let bytes = std::fs::read(golden.path().join("golden.qcow2")).unwrap();
        golden.server.put(at, WebObject::tagged(bytes, "v1"));
        golden
    }

    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// A command line; `URL` is the image's, and words that belong together are joined by `__`.
    pub fn command(&self, line: &str) -> Command {
        let url = self.server.url(self.at);
        let words = line
            .split(' ')
            .map(|word| word.replace("__", " ").replace("URL", &url));
        let mut command = cowslip();
        command.current_dir(self.path()).args(words);
        for name in [
            "COWSLIP_CACHE",
            "COWSLIP_REMOTE_TIMEOUT",
            "http_proxy",
            "HTTP_PROXY",
        ] {
            command.env_remove(name);
        }
        command
    }
}
