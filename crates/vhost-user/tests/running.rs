//! A server in this process, for front ends of tests.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cowslip_block::Disk;
use cowslip_queue::{Backend, Listener, Queue};
use cowslip_vhost_user::{Options, Server, ServerEvent, ServerHandle};

/// A server on a thread of its own.
pub struct Running {
    pub path: PathBuf,
    pub handle: ServerHandle,
    pub events: Arc<Mutex<Vec<String>>>,
    thread: Option<JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

impl Running {
    pub fn start(disk: Arc<dyn Disk>, options: Options) -> Running {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = Listener::unix(&path).unwrap();
        let mut server = Server::new(disk, options).unwrap();
        let events: Arc<Mutex<Vec<String>>> = Arc::default();
        let to = Arc::clone(&events);
        server.observe(move |event: &ServerEvent<'_>| {
            to.lock().unwrap().push(format!("{event:?}"));
        });
        let handle = server.handle();
        let thread = std::thread::spawn(move || {
            let queue = Queue::new(Backend::Auto).unwrap();
            queue.block_on(server.serve(listener));
        });
        Running {
            path,
            handle,
            events,
            thread: Some(thread),
            _dir: dir,
        }
    }

    /// Waits for an event that contains a text.
    pub fn wait_for_event(&self, text: &str) {
        let begun = Instant::now();
        while !self.events.lock().unwrap().iter().any(|e| e.contains(text)) {
            let waited = begun.elapsed() < Duration::from_secs(20);
            assert!(waited, "no '{text}' in {:?}", self.events.lock().unwrap());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn has_event(&self, text: &str) -> bool {
        self.events.lock().unwrap().iter().any(|e| e.contains(text))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.handle.stop();
        if std::thread::panicking() {
            eprintln!("events: {:?}", self.events.lock().unwrap());
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !std::thread::panicking()
        {
            panic!("the server panicked");
        }
    }
}
