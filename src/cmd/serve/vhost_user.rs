//! The transport vhost-user-blk: a socket by which a virtual machine monitor passes its guest's
//! memory, and the rings in it.

use std::path::PathBuf;

use cowslip::error::system_words;
use cowslip_queue::Listener;
use cowslip_vhost_user::{Options, Server, ServerEvent};

use super::sandbox::Rights;
use super::socket_name::{self, SocketName};
use super::transport::{Endpoint, LocalFuture, Log, Names, Served, Severity, Transport};
use crate::error::CommandError;

/// Options of the device, and the socket.
#[derive(Clone, Debug)]
pub struct VhostUser {
    /// Path of the socket.
    pub socket: PathBuf,
    /// Options of the device.
    pub options: Options,
}

impl Transport for VhostUser {
    fn has_predecessor(&self, _: &Log) -> Result<bool, CommandError> {
        Ok(SocketName::is_there(&self.socket))
    }

    fn listen<'a>(
        &'a self,
        served: &'a Served,
    ) -> LocalFuture<'a, Result<Box<dyn Endpoint>, CommandError>> {
        Box::pin(async move {
            let (listener, name) = SocketName::bind(&self.socket)?;
            let disk = std::sync::Arc::clone(&served.disk);
            let options = Options {
                poll: served.poll,
                ..self.options.clone()
            };
            let server = Server::new(disk, options);
            let mut server = server.map_err(|error| CommandError::new(system_words(&error)))?;
            observe(&mut server, &served.log);
            Ok(Box::new(Socket {
                server,
                listener,
                name,
            }) as Box<dyn Endpoint>)
        })
    }
}

fn observe(server: &mut Server, log: &Log) {
    if log.reports(Severity::Failure) {
        let log = log.clone();
        server.observe(move |event| {
            if log.reports(severity(event)) {
                log.write(described(event));
            }
        });
    }
}

/// A socket that front ends connect to.
struct Socket {
    server: Server,
    listener: Listener,
    name: SocketName,
}

impl Endpoint for Socket {
    fn rights(&self) -> Rights {
        Rights {
            removed: vec![self.name.path().to_owned()],
            // Front ends are accepted; threads start the rings that were made for them; tables of
            // requests in flight are made and sealed. Memory is mapped as data (`sandbox.rs`).
            calls: [
                &[
                    libc::SYS_accept4,
                    libc::SYS_io_uring_register,
                    libc::SYS_memfd_create,
                ],
                socket_name::REMOVING,
            ]
            .concat(),
        }
    }

    fn stopper(&self) -> Box<dyn Fn()> {
        let handle = self.server.handle();
        Box::new(move || handle.stop())
    }

    fn informer(&self) -> Box<dyn Fn()> {
        let handle = self.server.handle();
        Box::new(move || handle.resized())
    }

    fn serve(self: Box<Self>) -> LocalFuture<'static, Names> {
        Box::pin(async move {
            self.server.serve(self.listener).await;
            Some(Box::new(self.name) as _)
        })
    }
}

fn severity(event: &ServerEvent<'_>) -> Severity {
    match event {
        ServerEvent::Connected
        | ServerEvent::Disconnected { reason: None }
        | ServerEvent::RequestFailed { .. } => Severity::Usual,
        ServerEvent::Disconnected { reason: Some(_) }
        | ServerEvent::Refused { .. }
        | ServerEvent::QueueBroken { .. }
        | ServerEvent::AcceptFailed { .. } => Severity::Failure,
    }
}

fn described(event: &ServerEvent<'_>) -> String {
    match event {
        ServerEvent::Connected => "a front end connected".to_string(),
        ServerEvent::Disconnected { reason: None } => "the front end left".to_string(),
        ServerEvent::Disconnected {
            reason: Some(reason),
        } => format!("the front end was disconnected: {reason}"),
        ServerEvent::Refused { reason } => format!("a message was refused: {reason}"),
        ServerEvent::QueueBroken { queue, reason } => {
            format!("queue {queue} is stopped until the guest resets the device: {reason}")
        }
        ServerEvent::RequestFailed {
            queue,
            request,
            error,
        } => format!("queue {queue}: {request} failed: {error}"),
        ServerEvent::AcceptFailed { reason } => format!("accepting a front end failed: {reason}"),
    }
}
