//! [`Failure`]: why a request failed, and whether another attempt may help.

use std::error::Error as StdError;
use std::fmt;

use http::StatusCode;
use object_store::client::{HttpError, HttpErrorKind};

use crate::ending;
use crate::guard::{Refusal, code_in};
use crate::registry::Unfit;

/// The innermost reason for a failure, which the outer ones repeat.
pub fn reason(error: &object_store::Error) -> String {
    let mut reason: &(dyn StdError + 'static) = error;
    while let Some(source) = reason.source() {
        reason = source;
    }
    if let Some(error) = reason.downcast_ref::<std::io::Error>() {
        return cowslip_block::error::system_words(error);
    }
    let text = reason.to_string();
    match text.strip_prefix(STATUS) {
        Some(answer) => refusal_words(answer),
        None => text,
    }
}

/// The beginning of a store's words for a status that is no success, before it and the text.
const STATUS: &str = "Server returned non-2xx status code: ";

/// A status with its text, in the words of a [`Refusal`]: the text is a page of XML or JSON, of
/// which the code is repeated.
fn refusal_words(answer: &str) -> String {
    let (status, text) = answer.split_once(": ").unwrap_or((answer, ""));
    let code = code_in(text.as_bytes());
    let code = code.map_or_else(String::new, |code| format!(" ({code})"));
    format!("the server answers '{status}'{code}")
}

/// A failed request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The reason, in words without secrets.
    pub(crate) why: String,
    pub(crate) remedy: Remedy,
}

/// Whether another attempt may help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Remedy {
    /// A later attempt: the server is busy, or the network is disturbed.
    Wait,
    /// The server cannot be reached at all.
    Reach,
    /// Other credentials.
    Credentials,
    /// The object has another version.
    Changed,
    /// None.
    None,
}

impl Failure {
    pub(crate) fn new(why: impl Into<String>, remedy: Remedy) -> Failure {
        Failure {
            why: why.into(),
            remedy,
        }
    }

    /// The failure of a request that was not answered before the process was to end.
    pub(crate) fn of_ending<T>() -> Result<T, Failure> {
        Err(Failure::new(ending::WHY, Remedy::None))
    }

    /// The failure that a store reports.
    pub(crate) fn of(error: &object_store::Error) -> Failure {
        use object_store::Error;
        if let Error::Precondition { .. } | Error::NotModified { .. } = error {
            return Failure::new("it has changed", Remedy::Changed);
        }
        if let Error::NotSupported { .. } = error {
            return Failure::new("the server does not serve ranges of it", Remedy::None);
        }
        let mut deepest: &dyn StdError = error;
        let mut kind = None;
        loop {
            if let Some(refusal) = deepest.downcast_ref::<Refusal>() {
                return Failure::of_refusal(refusal);
            }
            if let Some(Unfit(why)) = deepest.downcast_ref::<Unfit>() {
                return Failure::new(why.clone(), Remedy::None);
            }
            if let Some(error) = deepest.downcast_ref::<HttpError>() {
                kind = Some(error.kind());
            }
            match deepest.source() {
                Some(source) => deepest = source,
                None => break,
            }
        }
        let why = deepest.to_string();
        match kind {
            // A certificate does not become valid by waiting.
            Some(HttpErrorKind::Connect) if why.contains("certificate") => {
                Failure::new(why, Remedy::None)
            }
            // The client's refusal to send anything in the clear.
            Some(_) if why.contains("URL scheme is not allowed") => {
                let why =
                    "the endpoint of the credentials is http://, and 'endpoint' does not say so";
                Failure::new(why, Remedy::None)
            }
            Some(HttpErrorKind::Connect) => Failure::new(why, Remedy::Reach),
            Some(HttpErrorKind::Timeout) => Failure::new("no answer in time", Remedy::Wait),
            Some(_) => Failure::new(why, Remedy::Wait),
            None => Failure::new(format!("a wrong answer: {why}"), Remedy::Wait),
        }
    }

    fn of_refusal(refusal: &Refusal) -> Failure {
        let expired = [
            "ExpiredToken",
            "ExpiredTokenException",
            "RequestTimeTooSkewed",
        ];
        let has_expired = |code: &String| expired.contains(&code.as_str());
        let remedy = match refusal.status {
            StatusCode::PRECONDITION_FAILED => Remedy::Changed,
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Remedy::Credentials,
            StatusCode::BAD_REQUEST if refusal.code.as_ref().is_some_and(has_expired) => {
                Remedy::Credentials
            }
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => Remedy::Wait,
            status if status.is_server_error() => Remedy::Wait,
            _ => Remedy::None,
        };
        Failure::new(refusal.to_string(), remedy)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_errors_are_one_line() {
        for (answer, words) in [
            (
                "403 Forbidden: <?xml?>\n<Error>\n  <Code>AuthorizationFailure</Code>\n</Error>",
                "the server answers '403 Forbidden' (AuthorizationFailure)",
            ),
            (
                "501 Not Implemented: ",
                "the server answers '501 Not Implemented'",
            ),
            (
                "500 Internal Server Error",
                "the server answers '500 Internal Server Error'",
            ),
        ] {
            assert_eq!(refusal_words(answer), words);
        }
    }
}
