//! The server side of the handshake: from the greeting to the choice of an export.
//!
//! All memory and time that a client can consume is bounded: the data of an option by
//! [`OPTION_BYTES_MAX`], the number of options by [`OPTIONS_MAX`], the time by the caller.
//!
//! A server with TLS requires it (FORCEDTLS in the specification): before `STARTTLS` it reveals and
//! negotiates nothing, and no state from before `STARTTLS` is kept afterwards.

use std::borrow::Cow;
use std::rc::Rc;
use std::sync::Arc;

use cowslip_queue::{Buf, Stream};

use super::{Offered, ServerEvent, Shared, describe};
use crate::export::{Access, ExportInfo};
use crate::inbox::{Ended, Inbox};
use crate::protocol::handshake::{
    CLIENT_FLAGS_BYTES, EXPORT_NAME_PADDING_BYTES, Info, InfoRequest, MetaContextEntry,
    MetaContextRequest, OPTION_HEADER_BYTES, OptionHeader, ServerEntry, decode_client_flags,
    encode_export_name_reply, encode_greeting, encode_option_reply,
};
use crate::protocol::{
    BASE_NAMESPACE, ClientFlags, DIRTY_BITMAP_NAMESPACE, HandshakeFlags, InfoCode, Malformed,
    OptionCode, OptionReplyCode, PAYLOAD_BYTES_MAX, QEMU_NAMESPACE, TransmissionFlags, string,
};
use crate::tls::ServerTls;
use crate::tls::session::Session;
use crate::wire::Wire;

/// Data of an option that is looked at: two strings of the maximum length, and queries.
const OPTION_BYTES_MAX: u32 = 16 << 10;
/// Data of an option that is read over, to answer that it is too long. Beyond that the client is
/// taken for hostile.
const SKIPPED_BYTES_MAX: u32 = 1 << 20;
/// Options in one handshake. Clients send about five, or two for each export that they list.
const OPTIONS_MAX: usize = 10_000;

/// A metadata context that was selected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Context {
    /// Its index in the export's list.
    pub(super) index: usize,
}

impl Context {
    /// Its identifier in replies to `BLOCK_STATUS`.
    pub(super) fn id(self) -> u32 {
        u32::try_from(self.index).expect("an export has few contexts") + 1
    }
}

/// Whether a query in a list of contexts is about the one of this name. Namespaces are about all
/// that is in them, as QEMU's server has it.
fn lists(query: &str, name: &str) -> bool {
    let is_namespace = [BASE_NAMESPACE, QEMU_NAMESPACE, DIRTY_BITMAP_NAMESPACE].contains(&query);
    query == name || is_namespace && name.starts_with(query)
}

/// How replies are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplyStyle {
    Simple,
    Structured,
    /// Structured, with extended headers, which requests have too.
    Extended,
}

/// Result of the handshake.
pub(super) struct Chosen {
    pub(super) name: String,
    pub(super) offered: Arc<Offered>,
    pub(super) info: ExportInfo,
    pub(super) replies: ReplyStyle,
    /// Contexts for `BLOCK_STATUS`; if there are none, it may not be asked for.
    pub(super) contexts: Vec<Context>,
}

/// Why there was no choice: a reason for the log, or none if the client took its leave.
type NoChoice = Option<String>;

/// Consequence of an option.
enum Step {
    Next,
    Leave,
    Secure,
    Transmit(Chosen),
}

/// Refusal of an option: the reply's code and its message.
struct Refusal(OptionReplyCode, Cow<'static, str>);

impl Refusal {
    fn new(code: OptionReplyCode, text: impl Into<Cow<'static, str>>) -> Refusal {
        Refusal(code, text.into())
    }
}

impl From<Malformed> for Refusal {
    fn from(malformed: Malformed) -> Refusal {
        Refusal::new(OptionReplyCode::ErrInvalid, malformed.0)
    }
}

/// Greets the client and answers its options until it has chosen an export.
pub(super) async fn negotiate(
    shared: &Shared,
    connection: u64,
    stream: &Stream,
    inbox: &mut Inbox,
) -> Result<Chosen, NoChoice> {
    let offered = HandshakeFlags::FIXED_NEWSTYLE.with(HandshakeFlags::NO_ZEROES);
    send(inbox, encode_greeting(offered).to_vec()).await?;
    let message = inbox.take(CLIENT_FLAGS_BYTES).await.map_err(gone)?;
    let flags = decode_client_flags(&message).map_err(broken)?;
    if flags.has_other_than(ClientFlags::FIXED_NEWSTYLE.with(ClientFlags::NO_ZEROES)) {
        return Err(Some("the client set an unknown flag".to_owned()));
    }
    let security = match shared.options.tls {
        Some(_) => Security::Missing,
        None => Security::NotOffered,
    };
    let mut haggling = Haggling::new(shared, flags, security);
    for _ in 0..OPTIONS_MAX {
        let message = inbox.take(OPTION_HEADER_BYTES).await.map_err(gone)?;
        let header = OptionHeader::decode(&message).map_err(broken)?;
        shared.notify(|| ServerEvent::Option {
            connection,
            option: header.option,
        });
        let step = match option_data(inbox, header).await? {
            Some(data) => haggling.answer(header.option, &data)?,
            None if header.option == OptionCode::ExportName => return Err(no_such_export()),
            None => haggling.answer_too_long(header.option),
        };
        // Bytes that arrive between the request for TLS and our reply were sent in the clear, but
        // would be taken for data protected by TLS.
        if matches!(step, Step::Secure) && !inbox.arrived().is_empty() {
            return Err(Some(
                "the client sent data before its TLS handshake".to_owned(),
            ));
        }
        send(inbox, std::mem::take(&mut haggling.out)).await?;
        match step {
            Step::Next => {}
            Step::Leave => return Err(None),
            Step::Secure => {
                secure(shared, connection, stream, inbox).await?;
                // Earlier agreements count no more.
                haggling = Haggling::new(shared, flags, Security::Present);
            }
            Step::Transmit(chosen) => return Ok(chosen),
        }
    }
    Err(Some("the client sent too many options".to_owned()))
}

/// Begins TLS, and finds out who the client is if that matters.
async fn secure(
    shared: &Shared,
    connection: u64,
    stream: &Stream,
    inbox: &mut Inbox,
) -> Result<(), NoChoice> {
    let tls: &ServerTls = shared.options.tls.as_ref().expect("it was offered");
    let begun = tls.connection().map_err(|error| Some(error.to_string()))?;
    let session = Rc::new(Session::new(stream.clone(), begun));
    inbox.switch(Wire::Tls(Rc::clone(&session)));
    let shaken = session.handshake().await;
    shaken.map_err(|error| Some(describe(&error)))?;
    tls.authorize(&session.peer()).map_err(Some)?;
    shared.notify(|| ServerEvent::Secured { connection });
    Ok(())
}

async fn send(inbox: &Inbox, message: Vec<u8>) -> Result<(), NoChoice> {
    inbox
        .wire()
        .write_all(Buf::from(message))
        .await
        .map_err(|error| Some(describe(&error)))
}

/// The data of an option, or `None` if it was too long and has been read over.
async fn option_data(inbox: &mut Inbox, header: OptionHeader) -> Result<Option<Vec<u8>>, NoChoice> {
    let len = usize::try_from(header.len).map_err(|_| Some("an endless option".to_owned()))?;
    if header.len <= OPTION_BYTES_MAX {
        return Ok(Some(inbox.take(len).await.map_err(gone)?));
    }
    if header.len <= SKIPPED_BYTES_MAX {
        inbox.skip(len).await.map_err(gone)?;
        return Ok(None);
    }
    Err(Some(format!(
        "the client sent an option of {} bytes",
        header.len
    )))
}

fn gone(ended: Ended) -> NoChoice {
    Some(describe(&ended.into()))
}

fn broken(malformed: Malformed) -> NoChoice {
    Some(malformed.to_string())
}

fn no_such_export() -> NoChoice {
    Some("the client chose an export that does not exist".to_owned())
}

/// Whether there is TLS on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Security {
    /// The server has none.
    NotOffered,
    /// TLS has to come first.
    Missing,
    Present,
}

/// The state of option haggling.
struct Haggling<'a> {
    shared: &'a Shared,
    flags: ClientFlags,
    security: Security,
    replies: ReplyStyle,
    /// The contexts that were selected, and for which export.
    selected: Option<(String, Vec<Context>)>,
    /// Bytes to send once the option is dealt with.
    out: Vec<u8>,
}

impl<'a> Haggling<'a> {
    fn new(shared: &'a Shared, flags: ClientFlags, security: Security) -> Haggling<'a> {
        Haggling {
            shared,
            flags,
            security,
            replies: ReplyStyle::Simple,
            selected: None,
            out: Vec::new(),
        }
    }

    fn reply(&mut self, option: OptionCode, reply: OptionReplyCode, data: &[u8]) {
        encode_option_reply(&mut self.out, option, reply, data);
    }

    fn refuse(&mut self, option: OptionCode, Refusal(reply, message): Refusal) {
        self.reply(option, reply, message.as_bytes());
    }

    fn answer_too_long(&mut self, option: OptionCode) -> Step {
        let reason = Refusal::new(OptionReplyCode::ErrTooBig, "the option is too long");
        self.refuse(option, self.needs_tls(option).unwrap_or(reason));
        Step::Next
    }

    /// The refusal of an option that TLS has to precede, if it is one.
    fn needs_tls(&self, option: OptionCode) -> Option<Refusal> {
        let may_precede = matches!(option, OptionCode::StartTls | OptionCode::Abort);
        let needed = self.security == Security::Missing && !may_precede;
        needed.then_some(Refusal::new(
            OptionReplyCode::ErrTlsRequired,
            "the option is not permitted before TLS",
        ))
    }

    fn answer(&mut self, option: OptionCode, data: &[u8]) -> Result<Step, NoChoice> {
        if option == OptionCode::ExportName {
            if self.security == Security::Missing {
                return Err(Some("the client chose an export without TLS".to_owned()));
            }
            return self.export_name(data).map(Step::Transmit);
        }
        if !self.flags.contains(ClientFlags::FIXED_NEWSTYLE) {
            // Such a client does not expect a reply to anything else.
            return Err(Some(
                "a client without fixed newstyle sent an option".to_owned(),
            ));
        }
        if let Some(refusal) = self.needs_tls(option) {
            self.refuse(option, refusal);
            return Ok(Step::Next);
        }
        let outcome = match option {
            OptionCode::Abort => Ok(Step::Leave),
            OptionCode::StartTls => self.start_tls(data),
            OptionCode::List => self.list(data),
            OptionCode::Info => self.info(option, data).map(|_| Step::Next),
            OptionCode::Go => self.info(option, data).map(Step::Transmit),
            OptionCode::StructuredReply => self.structured_reply(data),
            OptionCode::ListMetaContext => self.list_contexts(data),
            OptionCode::SetMetaContext => self.set_contexts(data),
            OptionCode::ExtendedHeaders => self.extended_headers(data),
            OptionCode::ExportName | OptionCode::Unknown(_) => Err(Refusal::new(
                OptionReplyCode::ErrUnsupported,
                "the option is not supported",
            )),
        };
        Ok(match outcome {
            Ok(step) => {
                self.reply(option, OptionReplyCode::Ack, &[]);
                step
            }
            Err(refusal) => {
                self.refuse(option, refusal);
                Step::Next
            }
        })
    }

    /// `EXPORT_NAME` has no way to say no, so a wrong name ends the connection.
    fn export_name(&mut self, data: &[u8]) -> Result<Chosen, NoChoice> {
        if self.replies == ReplyStyle::Extended {
            let why =
                "the client chose an export the old way after it had asked for extended headers";
            return Err(Some(why.to_owned()));
        }
        let name = string(data).map_err(broken)?;
        let exports = &self.shared.control.exports;
        let offered = exports.find(name).ok_or_else(no_such_export)?;
        let chosen = self.choose(name, offered);
        let flags = transmission_flags(&chosen, OptionCode::ExportName);
        self.out
            .extend_from_slice(&encode_export_name_reply(chosen.info.size, flags));
        if !self.flags.contains(ClientFlags::NO_ZEROES) {
            self.out.extend_from_slice(&[0; EXPORT_NAME_PADDING_BYTES]);
        }
        Ok(chosen)
    }

    fn start_tls(&self, data: &[u8]) -> Result<Step, Refusal> {
        no_data(data)?;
        match self.security {
            Security::Missing => Ok(Step::Secure),
            Security::NotOffered => Err(Refusal::new(
                OptionReplyCode::ErrPolicy,
                "TLS not configured",
            )),
            Security::Present => Err(Refusal::new(
                OptionReplyCode::ErrInvalid,
                "TLS already enabled",
            )),
        }
    }

    fn choose(&self, name: &str, offered: Arc<Offered>) -> Chosen {
        let mut info = offered.export.info();
        let sizes = &mut info.block_sizes;
        sizes.maximum = sizes.maximum.min(PAYLOAD_BYTES_MAX);
        debug_assert!(sizes.validate().is_ok(), "an export has valid block sizes");
        Chosen {
            name: name.to_owned(),
            offered,
            info,
            replies: self.replies,
            contexts: match &self.selected {
                Some((export, contexts)) if export == name => contexts.clone(),
                _ => Vec::new(),
            },
        }
    }

    fn list(&mut self, data: &[u8]) -> Result<Step, Refusal> {
        no_data(data)?;
        for entry in self.shared.control.exports.all() {
            let server = ServerEntry {
                name: entry.name.clone(),
                description: entry.export.description.clone(),
            };
            self.reply(OptionCode::List, OptionReplyCode::Server, &server.encode());
        }
        Ok(Step::Next)
    }

    /// Answers `INFO` and `GO`: describes an export, and with `GO` chooses it.
    fn info(&mut self, option: OptionCode, data: &[u8]) -> Result<Chosen, Refusal> {
        let request = InfoRequest::decode(data)?;
        let offered = self.find(&request.name)?;
        let chosen = self.choose(&request.name, offered);
        let mut replies = vec![Info::Export {
            size: chosen.info.size,
            flags: transmission_flags(&chosen, option),
        }];
        // Sent even if not requested: a client that does not know it ignores it, and one that did
        // not request it benefits.
        replies.push(Info::BlockSize(chosen.info.block_sizes));
        if request.infos.contains(&InfoCode::Name) {
            replies.push(Info::Name(request.name.clone()));
        }
        let description = &chosen.info.description;
        if request.infos.contains(&InfoCode::Description) && !description.is_empty() {
            replies.push(Info::Description(description.clone()));
        }
        for info in replies {
            self.reply(option, OptionReplyCode::Info, &info.encode());
        }
        Ok(chosen)
    }

    fn find(&self, name: &str) -> Result<Arc<Offered>, Refusal> {
        // QEMU's words, which its clients show, and no more of a long name.
        let unknown = || {
            let shown = match name.char_indices().nth(80) {
                Some((end, _)) => format!("{}...", &name[..end]),
                None => name.to_string(),
            };
            let text = format!("export '{shown}' not present");
            Refusal::new(OptionReplyCode::ErrUnknown, text)
        };
        self.shared.control.exports.find(name).ok_or_else(unknown)
    }

    fn structured_reply(&mut self, data: &[u8]) -> Result<Step, Refusal> {
        no_data(data)?;
        match self.replies {
            ReplyStyle::Simple => {
                self.replies = ReplyStyle::Structured;
                Ok(Step::Next)
            }
            ReplyStyle::Structured => Err(Refusal::new(
                OptionReplyCode::ErrInvalid,
                "structured replies are agreed on already",
            )),
            ReplyStyle::Extended => Err(Refusal::new(
                OptionReplyCode::ErrExtendedHeadersRequired,
                "extended headers are agreed on already",
            )),
        }
    }

    fn extended_headers(&mut self, data: &[u8]) -> Result<Step, Refusal> {
        no_data(data)?;
        if self.replies == ReplyStyle::Extended {
            let reason = "extended headers are agreed on already";
            return Err(Refusal::new(OptionReplyCode::ErrInvalid, reason));
        }
        self.replies = ReplyStyle::Extended;
        Ok(Step::Next)
    }

    fn contexts_request(&self, data: &[u8]) -> Result<MetaContextRequest, Refusal> {
        if self.replies == ReplyStyle::Simple {
            let reason = "structured replies must be agreed on first";
            return Err(Refusal::new(OptionReplyCode::ErrInvalid, reason));
        }
        let request = MetaContextRequest::decode(data)?;
        self.find(&request.name)?;
        Ok(request)
    }

    fn list_contexts(&mut self, data: &[u8]) -> Result<Step, Refusal> {
        let request = self.contexts_request(data)?;
        let queries = &request.queries;
        for name in self.find(&request.name)?.export.info().contexts {
            if queries.is_empty() || queries.iter().any(|query| lists(query, &name)) {
                // The identifier means nothing in a list.
                self.context(OptionCode::ListMetaContext, 0, name);
            }
        }
        Ok(Step::Next)
    }

    fn set_contexts(&mut self, data: &[u8]) -> Result<Step, Refusal> {
        // Whatever the outcome, it replaces what was selected before.
        self.selected = None;
        let request = self.contexts_request(data)?;
        let names = self.find(&request.name)?.export.info().contexts;
        let mut contexts = Vec::new();
        for (index, name) in names.iter().enumerate() {
            let is_first = !names[..index].contains(name);
            if is_first && request.queries.contains(name) {
                let context = Context { index };
                self.context(OptionCode::SetMetaContext, context.id(), name.clone());
                contexts.push(context);
            }
        }
        self.selected = Some((request.name, contexts));
        Ok(Step::Next)
    }

    fn context(&mut self, option: OptionCode, id: u32, name: String) {
        let entry = MetaContextEntry { id, name };
        self.reply(option, OptionReplyCode::MetaContext, &entry.encode());
    }
}

fn no_data(data: &[u8]) -> Result<(), Refusal> {
    match data {
        [] => Ok(()),
        _ => Err(Refusal::new(
            OptionReplyCode::ErrInvalid,
            "the option takes no data",
        )),
    }
}

/// Returns the client's abilities on the export, in answer to an option.
fn transmission_flags(chosen: &Chosen, option: OptionCode) -> TransmissionFlags {
    let (info, replies) = (&chosen.info, chosen.replies);
    let writable = info.access == Access::ReadWrite;
    // A client that has selected no context has none to choose from. INFO does not commit to a
    // choice yet.
    let may_choose = option == OptionCode::Info || !chosen.contexts.is_empty();
    TransmissionFlags::HAS_FLAGS
        .with(TransmissionFlags::SEND_FLUSH)
        .with(TransmissionFlags::SEND_FUA)
        .with(TransmissionFlags::SEND_CACHE)
        .with_if(TransmissionFlags::READ_ONLY, !writable)
        .with_if(TransmissionFlags::ROTATIONAL, info.rotational)
        .with_if(TransmissionFlags::SEND_TRIM, writable)
        .with_if(TransmissionFlags::SEND_WRITE_ZEROES, writable)
        .with_if(TransmissionFlags::SEND_FAST_ZERO, writable)
        .with_if(TransmissionFlags::SEND_DF, replies != ReplyStyle::Simple)
        .with_if(TransmissionFlags::CAN_MULTI_CONN, info.shared_cache)
        .with_if(
            TransmissionFlags::BLOCK_STATUS_PAYLOAD,
            replies == ReplyStyle::Extended && may_choose,
        )
}
