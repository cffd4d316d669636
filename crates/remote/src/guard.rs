//! [`GuardedConnector`]: the HTTP client, with bounds on what a hostile server can make it keep,
//! and with the status of a response that is no success as an error of its own.
//!
//! What puts the parts of an upload together asks, on the way, that there is no object of that
//! name: the stores' own requests for that have no such condition.
//!
//! The stores read the text of an error response as a whole to report it. Here it ends after
//! [`ERROR_TEXT_MAX`] bytes, and other answers than ranges of objects after [`ANSWER_MAX`].

use std::fmt;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use http::{HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt, Limited};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService, ReqwestConnector,
};

use crate::options::Retries;
use crate::url::Scheme;

/// Bytes of an error response that are read.
const ERROR_TEXT_MAX: usize = 4096;
/// Bytes of an answer that is no range of an object, such as a page of a list: those have at most
/// a thousand keys of a kilobyte, with as much around each.
const ANSWER_MAX: usize = 16 << 20;

/// Makes clients that bound what they read of errors.
#[derive(Debug)]
pub(crate) struct GuardedConnector {
    pub(crate) retries: Retries,
    pub(crate) scheme: Scheme,
}

impl HttpConnector for GuardedConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Guarded {
            client: ReqwestConnector::default().connect(options)?,
            retries: self.retries,
            scheme: self.scheme,
        }))
    }
}

#[derive(Debug)]
struct Guarded {
    client: HttpClient,
    retries: Retries,
    scheme: Scheme,
}

/// Whether a request puts the parts of an upload together, and may have a condition. Google's store
/// takes none; in Azure's, a signature by the account's key has the headers that it was made for.
fn completes_upload(scheme: Scheme, request: &HttpRequest) -> bool {
    let query = request.uri().query().unwrap_or_default();
    let has = |wanted: &str| query.split('&').any(|pair| pair.starts_with(wanted));
    match scheme {
        Scheme::S3 => request.method() == Method::POST && has("uploadId="),
        Scheme::Azure => {
            let authorization = request.headers().get(http::header::AUTHORIZATION);
            let is_signed = authorization.is_some_and(|it| it.as_bytes().starts_with(b"SharedKey"));
            request.method() == Method::PUT && has("comp=blocklist") && !is_signed
        }
        Scheme::Google | Scheme::Http | Scheme::Https | Scheme::Registry => false,
    }
}

impl Guarded {
    /// Sends a request that completes an upload, on condition that there is no such object; without
    /// one to a store that says it knows none.
    async fn complete(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let mut conditional = request.clone();
        let headers = conditional.headers_mut();
        headers.insert(http::header::IF_NONE_MATCH, HeaderValue::from_static("*"));
        let response = self.client.execute(conditional).await?;
        match response.status() {
            StatusCode::NOT_IMPLEMENTED => self.client.execute(request).await,
            _ => Ok(response),
        }
    }
}

#[async_trait]
impl HttpService for Guarded {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        // Who asks for a range counts what comes; all else is read to its end by the stores.
        let is_counted = request.headers().contains_key(http::header::RANGE);
        let response = match completes_upload(self.scheme, &request) {
            true => self.complete(request).await?,
            false => self.client.execute(request).await?,
        };
        let status = response.status();
        if status.is_success() && is_counted {
            return Ok(response);
        }
        if status.is_success() {
            let (parts, body) = response.into_parts();
            let limited = Limited::new(body, ANSWER_MAX);
            let limited = limited.map_err(|_| HttpError::new(HttpErrorKind::Decode, TooLong));
            let body = HttpResponseBody::new(limited);
            return Ok(HttpResponse::from_parts(parts, body));
        }
        let (parts, body) = response.into_parts();
        let text = beginning(body).await?;
        match self.retries {
            Retries::ByStore(_) => Ok(HttpResponse::from_parts(parts, text.into())),
            // The stores keep to themselves what they made of it.
            Retries::ByCaller => Err(HttpError::new(
                HttpErrorKind::Unknown,
                Refusal {
                    status,
                    code: code_in(&text),
                },
            )),
        }
    }
}

/// An answer that is longer than any that a store gives, or breaks off.
#[derive(Debug)]
struct TooLong;

impl fmt::Display for TooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the answer breaks off, or has more than {ANSWER_MAX} bytes"
        )
    }
}

impl std::error::Error for TooLong {}

/// The first bytes of a body. The rest is left unread, which ends the connection.
pub(crate) async fn beginning(mut body: HttpResponseBody) -> Result<Bytes, HttpError> {
    let mut text = BytesMut::new();
    while text.len() < ERROR_TEXT_MAX {
        let Some(frame) = body.frame().await else {
            break;
        };
        if let Ok(bytes) = frame?.into_data() {
            let room = ERROR_TEXT_MAX - text.len();
            text.extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
    }
    Ok(text.freeze())
}

/// A response that is no success.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    /// The code that object stores give in the text, such as `ExpiredToken`.
    pub(crate) code: Option<String>,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the server answers '{}'", self.status)?;
        match &self.code {
            Some(code) => write!(f, " ({code})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Refusal {}

/// The code of an error in XML. It is the server's text: only a plain word is repeated.
pub(crate) fn code_in(text: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(text).ok()?;
    let (_, rest) = text.split_once("<Code>")?;
    let (code, _) = rest.split_once("</Code>")?;
    let is_plain = code.len() <= 64 && code.bytes().all(|byte| byte.is_ascii_alphanumeric());
    is_plain.then(|| code.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_codes_of_a_server_are_repeated() {
        assert_eq!(
            code_in(b"<?xml?><Error><Code>ExpiredToken</Code><Message>x</Message>").as_deref(),
            Some("ExpiredToken")
        );
        assert_eq!(code_in(b"<Code>\x1b[31m</Code>"), None);
        assert_eq!(code_in(b"<Code>never ends"), None);
        assert_eq!(code_in(b"\xff<Code>X</Code>"), None);
    }
}
