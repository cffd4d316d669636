//! The handshake as a client: choosing an export, or listing them all.
//!
//! Falls back where a server lacks something: from extended headers to structured replies and to
//! simple ones, and from `GO` to `EXPORT_NAME`; but never to a connection in the clear. TLS comes
//! first, so nobody on the way has a say in the rest.

use std::io;
use std::rc::Rc;

use cowslip_queue::{Buf, Stream};

use super::{ClientError, ConnectOptions, ExportDescription, Headers};
use crate::inbox::{Ended, Inbox};
use crate::protocol::handshake::{
    EXPORT_NAME_PADDING_BYTES, EXPORT_NAME_REPLY_BYTES, Info, InfoRequest, MAGICS_BYTES,
    MetaContextEntry, MetaContextRequest, OFFER_BYTES, OLDSTYLE_EXPORT_BYTES,
    OPTION_REPLY_HEADER_BYTES, OptionReplyHeader, ServerEntry, Style, decode_export_name_reply,
    decode_magics, decode_offer, decode_oldstyle_export, encode_client_flags, encode_option,
};
use crate::protocol::{
    BASE_ALLOCATION, ClientFlags, HandshakeFlags, InfoCode, Malformed, OptionCode, OptionReplyCode,
    STRING_BYTES_MAX, TransmissionFlags,
};
use crate::tls::ClientTls;
use crate::tls::session::Session;
use crate::wire::Wire;

/// Data of a reply to an option: two strings of the maximum length and a few numbers.
const REPLY_BYTES_MAX: u32 = 16 << 10;
/// Replies to one option; a list of exports is the longest.
const REPLIES_MAX: usize = 10_000;

/// Result of the handshake.
pub(super) struct Agreed {
    pub(super) export: ExportDescription,
    pub(super) status_context: Option<u32>,
    pub(super) headers: Headers,
}

/// Negotiates an export, with its metadata contexts.
pub(super) async fn choose(
    stream: Stream,
    options: &ConnectOptions,
) -> Result<(Agreed, Inbox), ClientError> {
    if options.export.len() > STRING_BYTES_MAX {
        return Err(Malformed("the export's name is longer than 4096 bytes").into());
    }
    let mut agreed = Agreed {
        export: ExportDescription::unknown(&options.export),
        status_context: None,
        headers: Headers::Simple,
    };
    let mut haggling = match greet(stream, options.tls.as_ref()).await? {
        Greeted::New(haggling) => haggling,
        Greeted::Old(..) if !options.export.is_empty() => {
            return Err(Malformed("an oldstyle server has one export, without a name").into());
        }
        Greeted::Old(export, inbox) => {
            agreed.export = export;
            return Ok((agreed, inbox));
        }
    };
    if haggling.fixed_newstyle {
        if options.structured_replies {
            agreed.headers = haggling.headers(options.extended_headers).await?;
        }
        let extended = agreed.headers == Headers::Extended;
        agreed.export.extended_headers = extended;
        if agreed.headers != Headers::Simple && options.block_status {
            let name = &options.export;
            agreed.status_context = haggling.select_status(name).await?;
        }
        if haggling
            .describe(OptionCode::Go, &mut agreed.export)
            .await?
        {
            if agreed.status_context.is_some() {
                agreed.export.contexts = vec![BASE_ALLOCATION.to_owned()];
            }
            return Ok((agreed, haggling.inbox));
        }
        if extended {
            let why = "the server has extended headers, but no way to choose an export with them";
            return Err(Malformed(why).into());
        }
    }
    haggling.export_name(&mut agreed.export).await?;
    if agreed.status_context.is_some() {
        agreed.export.contexts = vec![BASE_ALLOCATION.to_owned()];
    }
    Ok((agreed, haggling.inbox))
}

/// Describes all exports and takes leave.
pub(super) async fn list(
    stream: Stream,
    tls: Option<&ClientTls>,
) -> Result<Vec<ExportDescription>, ClientError> {
    let mut haggling = match greet(stream, tls).await? {
        Greeted::New(haggling) => haggling,
        Greeted::Old(export, inbox) => {
            inbox.wire().farewell().await;
            return Ok(vec![export]);
        }
    };
    if !haggling.fixed_newstyle {
        return Err(Malformed("the server is too old to list its exports").into());
    }
    let headers = haggling.headers(true).await?;
    let replies = accepted(haggling.option(OptionCode::List, &[]).await?)?;
    let mut exports = Vec::new();
    for (reply, data) in replies {
        if reply != OptionReplyCode::Server {
            return Err(UNEXPECTED_REPLY.into());
        }
        let entry = ServerEntry::decode(&data)?;
        let mut export = ExportDescription::unknown(&entry.name);
        haggling.describe(OptionCode::Info, &mut export).await?;
        if export.description.is_empty() {
            export.description = entry.description;
        }
        export.extended_headers = headers == Headers::Extended;
        if headers != Headers::Simple {
            export.contexts = haggling.list_contexts(&entry.name).await?;
        }
        exports.push(export);
    }
    haggling.send(OptionCode::Abort, &[]).await?;
    haggling.inbox.wire().farewell().await;
    Ok(exports)
}

const UNEXPECTED_REPLY: Malformed = Malformed("a reply that does not fit the option");

impl ExportDescription {
    fn unknown(name: &str) -> ExportDescription {
        ExportDescription {
            name: name.to_owned(),
            description: String::new(),
            size: 0,
            flags: TransmissionFlags::empty(),
            block_sizes: None,
            extended_headers: false,
            contexts: Vec::new(),
        }
    }
}

/// The replies to an option but for the one that ends them.
type Replies = Vec<(OptionReplyCode, Vec<u8>)>;

/// How an option was answered.
enum Answer {
    Accepted(Replies),
    Refused {
        reply: OptionReplyCode,
        message: String,
    },
}

/// The replies of an option that must be accepted.
fn accepted(answer: Answer) -> Result<Replies, ClientError> {
    match answer {
        Answer::Accepted(replies) => Ok(replies),
        Answer::Refused { reply, message } => Err(ClientError::Refused { reply, message }),
    }
}

/// Greeting of a server.
enum Greeted {
    /// A newstyle server, which takes options.
    New(Haggling),
    /// An oldstyle server, which has described its export, and waits for requests.
    Old(ExportDescription, Inbox),
}

/// Hears the server's greeting and answers it.
async fn greet(stream: Stream, tls: Option<&ClientTls>) -> Result<Greeted, ClientError> {
    let mut inbox = Inbox::new(Wire::Plain(stream.clone()));
    let magics = inbox.take(MAGICS_BYTES).await?;
    match decode_magics(&magics)? {
        Style::New => Haggling::begin(stream, inbox, tls).await.map(Greeted::New),
        Style::Old if tls.is_some() => Err(no_tls()),
        Style::Old => {
            let message = inbox.take(OLDSTYLE_EXPORT_BYTES).await?;
            let mut export = ExportDescription::unknown("");
            (export.size, export.flags) = decode_oldstyle_export(&message)?;
            inbox.skip(EXPORT_NAME_PADDING_BYTES).await?;
            Ok(Greeted::Old(export, inbox))
        }
    }
}

/// The error for servers older than the option for TLS.
fn no_tls() -> ClientError {
    ClientError::Tls("Server does not support STARTTLS".into())
}

/// The phase of option haggling (`doc/proto.md`): a stream on which options are sent and answered.
struct Haggling {
    inbox: Inbox,
    fixed_newstyle: bool,
    no_zeroes: bool,
}

impl Haggling {
    async fn begin(
        stream: Stream,
        mut inbox: Inbox,
        tls: Option<&ClientTls>,
    ) -> Result<Haggling, ClientError> {
        let offered = decode_offer(&inbox.take(OFFER_BYTES).await?)?;
        let fixed_newstyle = offered.contains(HandshakeFlags::FIXED_NEWSTYLE);
        let no_zeroes = offered.contains(HandshakeFlags::NO_ZEROES);
        let flags = ClientFlags::empty()
            .with_if(ClientFlags::FIXED_NEWSTYLE, fixed_newstyle)
            .with_if(ClientFlags::NO_ZEROES, no_zeroes);
        let message = Buf::copy_of(&encode_client_flags(flags));
        stream.write_all(message).await?;
        let mut haggling = Haggling {
            inbox,
            fixed_newstyle,
            no_zeroes,
        };
        if let Some(tls) = tls {
            haggling.secure(stream, tls).await?;
        }
        Ok(haggling)
    }

    /// Begins TLS. Nothing has been asked yet, and if this fails nothing will be.
    async fn secure(&mut self, stream: Stream, tls: &ClientTls) -> Result<(), ClientError> {
        if !self.fixed_newstyle {
            return Err(no_tls());
        }
        match self.option(OptionCode::StartTls, &[]).await? {
            Answer::Accepted(replies) if replies.is_empty() => {}
            Answer::Accepted(_) => return Err(UNEXPECTED_REPLY.into()),
            Answer::Refused {
                reply: OptionReplyCode::ErrUnsupported,
                ..
            } => {
                let text = "Server don't support STARTTLS option";
                return Err(ClientError::Tls(text.into()));
            }
            Answer::Refused { message, .. } => {
                let denied = "Denied by server for option 5 (starttls)";
                return Err(ClientError::Tls(match message.is_empty() {
                    true => denied.to_string(),
                    false => format!("{denied}\nserver reported: {message}"),
                }));
            }
        }
        if !self.inbox.arrived().is_empty() {
            // It would be taken for what the server says under TLS.
            return Err(Malformed("the server sent data before its TLS handshake").into());
        }
        let begun = tls.connection();
        let begun = begun.map_err(|error| ClientError::Tls(error.to_string()))?;
        let session = Rc::new(Session::new(stream, begun));
        self.inbox.switch(Wire::Tls(Rc::clone(&session)));
        let shaken = session.handshake().await;
        shaken.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => ClientError::Tls(error.to_string()),
            // QEMU's servers say no more than this to whom they do not believe, and QEMU's clients
            // say it so.
            io::ErrorKind::UnexpectedEof => ClientError::Tls(
                "TLS handshake failed: The TLS connection was non-properly terminated.".into(),
            ),
            _ => error.into(),
        })
    }

    async fn send(&mut self, option: OptionCode, data: &[u8]) -> Result<(), ClientError> {
        let mut message = Vec::new();
        encode_option(&mut message, option, data);
        let message = Buf::from(message);
        let Err(error) = self.inbox.wire().write_all(message).await else {
            return Ok(());
        };
        // A server that has refused our certificate has hung up, but said why before.
        match self.inbox.receive().await {
            Err(Ended::Failed(why)) if why.kind() == io::ErrorKind::InvalidData => Err(why.into()),
            _ => Err(error.into()),
        }
    }

    /// Sends an option and takes its replies up to the one that ends them.
    async fn option(&mut self, option: OptionCode, data: &[u8]) -> Result<Answer, ClientError> {
        self.send(option, data).await?;
        let mut replies = Vec::new();
        while replies.len() < REPLIES_MAX {
            let header = self.inbox.take(OPTION_REPLY_HEADER_BYTES).await?;
            let header = OptionReplyHeader::decode(&header)?;
            if header.option != option {
                return Err(Malformed("a reply to another option").into());
            }
            if header.len > REPLY_BYTES_MAX {
                return Err(Malformed("an option reply is too long").into());
            }
            let data = self.inbox.take(header.len as usize).await?;
            match header.reply {
                OptionReplyCode::Ack => return Ok(Answer::Accepted(replies)),
                reply if reply.is_error() => {
                    let message = String::from_utf8_lossy(&data).into_owned();
                    return Ok(Answer::Refused { reply, message });
                }
                reply => replies.push((reply, data)),
            }
        }
        Err(Malformed("an option has too many replies").into())
    }

    /// The best headers that the server agrees to.
    async fn headers(&mut self, extended: bool) -> Result<Headers, ClientError> {
        let wanted = [
            (OptionCode::ExtendedHeaders, Headers::Extended),
            (OptionCode::StructuredReply, Headers::Structured),
        ];
        for (option, headers) in wanted.into_iter().skip(usize::from(!extended)) {
            if let Answer::Accepted(_) = self.option(option, &[]).await? {
                return Ok(headers);
            }
        }
        Ok(Headers::Simple)
    }

    /// Selects `base:allocation` and returns its identifier, if the server has it.
    async fn select_status(&mut self, name: &str) -> Result<Option<u32>, ClientError> {
        let request = MetaContextRequest {
            name: name.to_owned(),
            queries: vec![BASE_ALLOCATION.to_owned()],
        };
        let option = OptionCode::SetMetaContext;
        let Answer::Accepted(replies) = self.option(option, &request.encode()).await? else {
            // A wrong name shows again, with better words, when it is chosen.
            return Ok(None);
        };
        match &replies[..] {
            [] => Ok(None),
            [(OptionReplyCode::MetaContext, data)] => {
                let entry = MetaContextEntry::decode(data)?;
                if entry.name != BASE_ALLOCATION {
                    return Err(Malformed("a metadata context that was not asked for").into());
                }
                Ok(Some(entry.id))
            }
            _ => Err(UNEXPECTED_REPLY.into()),
        }
    }

    async fn list_contexts(&mut self, name: &str) -> Result<Vec<String>, ClientError> {
        let request = MetaContextRequest {
            name: name.to_owned(),
            queries: Vec::new(),
        };
        let option = OptionCode::ListMetaContext;
        let Answer::Accepted(replies) = self.option(option, &request.encode()).await? else {
            return Ok(Vec::new());
        };
        let mut contexts = Vec::new();
        for (reply, data) in replies {
            if reply != OptionReplyCode::MetaContext {
                return Err(UNEXPECTED_REPLY.into());
            }
            contexts.push(MetaContextEntry::decode(&data)?.name);
        }
        Ok(contexts)
    }

    /// `INFO` or `GO`. Returns `false` if the server does not know the option.
    async fn describe(
        &mut self,
        option: OptionCode,
        export: &mut ExportDescription,
    ) -> Result<bool, ClientError> {
        let request = InfoRequest {
            name: export.name.clone(),
            infos: vec![InfoCode::Name, InfoCode::Description, InfoCode::BlockSize],
        };
        let answer = self.option(option, &request.encode()).await?;
        if let Answer::Refused { reply, .. } = &answer
            && *reply == OptionReplyCode::ErrUnsupported
        {
            return Ok(false);
        }
        let mut size_known = false;
        for (reply, data) in accepted(answer)? {
            if reply != OptionReplyCode::Info {
                return Err(UNEXPECTED_REPLY.into());
            }
            match Info::decode(&data)? {
                Info::Export { size, flags } => {
                    export.size = size;
                    export.flags = flags;
                    size_known = true;
                }
                Info::Name(_) | Info::Unknown(_) => {}
                Info::Description(description) => export.description = description,
                Info::BlockSize(sizes) => export.block_sizes = Some(sizes),
            }
        }
        if !size_known {
            return Err(Malformed("the server does not say the export's size").into());
        }
        Ok(true)
    }

    /// The old way to choose an export: the server hangs up if there is none of the name.
    async fn export_name(&mut self, export: &mut ExportDescription) -> Result<(), ClientError> {
        self.send(OptionCode::ExportName, export.name.as_bytes())
            .await?;
        let message = self.inbox.take(EXPORT_NAME_REPLY_BYTES).await?;
        (export.size, export.flags) = decode_export_name_reply(&message)?;
        if !self.no_zeroes {
            self.inbox.skip(EXPORT_NAME_PADDING_BYTES).await?;
        }
        Ok(())
    }
}
