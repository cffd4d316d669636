//! [`RegistryConnector`]: disks in registries of containers, `oci://HOST/REPOSITORY:TAG`, by the
//! distribution protocol of the Open Container Initiative (version 1.1).
//!
//! An image is a manifest that names blobs; one of them holds the disk. Which one is found out with
//! the first request and never again. Each request for the object becomes one for the blob, or for
//! the part of it that is the file in a tar archive; the answer gets the blob's digest as its ETag,
//! as blobs never change: a tag that moves on to another one is noticed when it is opened again.
//!
//! A registry asks for a token by the status 401, and says where one is to be had; a token that has
//! expired is replaced in the same way. User and password go to where the registry says, as with
//! all clients of it: over TLS, unless the registry itself is spoken to without.

use std::sync::{Mutex, PoisonError};

use async_trait::async_trait;
use bytes::BytesMut;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, ETAG, IF_MATCH, RANGE};
use http::header::{IF_UNMODIFIED_SINCE, LAST_MODIFIED, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, Uri};
use http_body_util::BodyExt;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
    HttpResponse, HttpResponseBody, HttpService, ReqwestConnector,
};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::sync::OnceCell;
use zeroize::Zeroizing;

use crate::guard::{Refusal, beginning, code_in};
pub(crate) use login::basic;
use manifest::{Challenge, Kind};
pub(crate) use name::{ImageName, base};

mod login;
mod manifest;
mod name;
mod tar;

/// Longest manifest, answer with a token, and record of a tar archive that are read, in bytes.
const ANSWER_MAX: usize = 4 << 20;
/// Entries of a tar archive that are looked at.
const ENTRIES_MAX: usize = 256;

/// An image that this cannot be read from, in words. Waiting does not help.
#[derive(Debug)]
pub(crate) struct Unfit(pub(crate) String);

impl std::fmt::Display for Unfit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unfit {}

fn unfit(why: impl Into<String>) -> HttpError {
    HttpError::new(HttpErrorKind::Unknown, Unfit(why.into()))
}

/// Makes clients of an image in a registry.
#[derive(Debug)]
pub(crate) struct RegistryConnector {
    pub(crate) image: ImageName,
    /// The value of a header with user and password.
    pub(crate) basic: Option<Zeroizing<String>>,
}

impl HttpConnector for RegistryConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Registry {
            client: ReqwestConnector::default().connect(options)?,
            image: self.image.clone(),
            basic: self.basic.clone(),
            authorization: Mutex::new(None),
            blob: OnceCell::new(),
        }))
    }
}

struct Registry {
    client: HttpClient,
    image: ImageName,
    basic: Option<Zeroizing<String>>,
    /// The value that the registry has accepted last.
    authorization: Mutex<Option<HeaderValue>>,
    blob: OnceCell<Blob>,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Registry({:?})", self.image)
    }
}

/// The bytes of a disk in a blob.
#[derive(Debug)]
struct Blob {
    uri: Uri,
    /// The digest, as an ETag.
    tag: HeaderValue,
    offset: u64,
    bytes: u64,
}

impl Registry {
    /// Sends a request, with a new token if the registry wants one.
    async fn send(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let response = self.attempt(request.clone()).await?;
        if response.status() != StatusCode::UNAUTHORIZED {
            return Ok(response);
        }
        let challenge = response.headers().get(WWW_AUTHENTICATE);
        let challenge = challenge.and_then(|header| header.to_str().ok());
        let header = match challenge.and_then(Challenge::parse) {
            Some(Challenge::Bearer(server)) => self.token(&server).await?,
            Some(Challenge::Basic) if self.basic.is_some() => self.basic_header()?,
            _ => return Ok(response),
        };
        *self.authorization() = Some(header);
        self.attempt(request).await
    }

    fn authorization(&self) -> std::sync::MutexGuard<'_, Option<HeaderValue>> {
        self.authorization
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    async fn attempt(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        if let Some(header) = self.authorization().clone() {
            request.headers_mut().insert(AUTHORIZATION, header);
        }
        self.client.execute(request).await
    }

    fn basic_header(&self) -> Result<HeaderValue, HttpError> {
        secret_header(self.basic.as_ref().map_or("", |basic| basic.as_str()))
    }

    /// Asks the server that a challenge names for a token.
    async fn token(&self, server: &manifest::TokenServer) -> Result<HeaderValue, HttpError> {
        let url = server
            .url()
            .ok_or_else(|| unfit("the registry names no server of tokens"))?;
        if url.scheme() != "https" && !self.image.is_in_the_clear() {
            return Err(unfit("the registry's server of tokens is no https:// URL"));
        }
        let mut headers = HeaderMap::new();
        if self.basic.is_some() {
            headers.insert(AUTHORIZATION, self.basic_header()?);
        }
        let answer = self.client.execute(get(url.as_str(), headers)?).await?;
        let bytes = whole(answer).await?;
        let answer: Value = serde_json::from_slice(&bytes)
            .map_err(|_| unfit("the registry's server of tokens answers with no token"))?;
        let token = answer.get("token").or(answer.get("access_token"));
        let token = token.and_then(Value::as_str).unwrap_or_default();
        secret_header(&format!("Bearer {token}"))
    }

    /// The manifest of a reference, whose digest is checked if it is one.
    async fn manifest(&self, reference: &str) -> Result<Value, HttpError> {
        let url = self.image.manifest_url(reference);
        let headers = HeaderMap::from_iter([(ACCEPT, HeaderValue::from_static(manifest::TYPES))]);
        let bytes = whole(self.send(get(&url, headers)?).await?).await?;
        if let Some(digest) = reference.strip_prefix("sha256:") {
            let found = Sha256::digest(&bytes);
            let found: String = found.iter().map(|byte| format!("{byte:02x}")).collect();
            if found != digest {
                return Err(unfit("the manifest has another digest than its name"));
            }
        }
        serde_json::from_slice(&bytes).map_err(|_| unfit("the manifest is no JSON"))
    }

    /// Finds the blob with the disk.
    async fn find(&self) -> Result<Blob, HttpError> {
        let mut manifest = self.manifest(self.image.reference()).await?;
        if let Some(digest) = manifest::of_platform(&manifest).map_err(unfit)? {
            manifest = self.manifest(&digest).await?;
        }
        let layer = manifest::layer(&manifest, self.image.layer()).map_err(unfit)?;
        let url = self.image.blob_url(&layer.digest);
        let mut blob = Blob {
            uri: url
                .parse()
                .map_err(|_| unfit("the blob has no possible URL"))?,
            tag: HeaderValue::from_str(&format!("\"{}\"", layer.digest))
                .map_err(|_| unfit("the digest of the blob is none"))?,
            offset: 0,
            bytes: layer.bytes,
        };
        let beginning = self.part(&blob, 0, tar::RECORD).await?;
        match Kind::of(&beginning) {
            Kind::Compressed => Err(unfit(format!(
                "the blob '{}' ({}) is compressed, and no part of it can be read by itself: push the disk uncompressed",
                layer.digest,
                layer.media_type.escape_default()
            ))),
            Kind::Tar if layer.is_archive() => {
                (blob.offset, blob.bytes) = self.file_in(&blob).await?;
                Ok(blob)
            }
            Kind::Tar | Kind::Other => Ok(blob),
        }
    }

    /// The only disk in a tar archive: the file below `disk/`, or the only one at all.
    async fn file_in(&self, blob: &Blob) -> Result<(u64, u64), HttpError> {
        let mut archive = tar::Archive::default();
        for _ in 0..ENTRIES_MAX {
            let at = archive.next_at();
            if at >= blob.bytes {
                break;
            }
            let record = self.part(blob, at, tar::RECORD).await?;
            match archive.add(&record).map_err(unfit)? {
                tar::Step::Next => {}
                tar::Step::End => break,
                tar::Step::Extended(len) => {
                    let text = self.part(blob, at + tar::RECORD, len).await?;
                    archive.extend(&text);
                }
            }
        }
        let (offset, bytes) = archive.disk().map_err(unfit)?;
        match offset
            .checked_add(bytes)
            .is_some_and(|end| end <= blob.bytes)
        {
            true => Ok((offset, bytes)),
            false => Err(unfit("the archive ends before its file does")),
        }
    }

    /// Bytes of a blob; fewer at its end.
    async fn part(&self, blob: &Blob, at: u64, len: u64) -> Result<Vec<u8>, HttpError> {
        let end = (at + len).min(blob.bytes);
        if at >= end {
            return Ok(Vec::new());
        }
        let range = header(&format!("bytes={at}-{}", end - 1))?;
        let request = get(
            &blob.uri.to_string(),
            HeaderMap::from_iter([(RANGE, range)]),
        )?;
        let response = self.send(request).await?;
        if response.status() == StatusCode::OK {
            return Err(unfit("the registry does not serve ranges of blobs"));
        }
        let bytes = whole(response).await?;
        match bytes.len() as u64 == end - at {
            true => Ok(bytes),
            false => Err(unfit("the blob is shorter than its manifest says")),
        }
    }
}

fn get(url: &str, headers: HeaderMap) -> Result<HttpRequest, HttpError> {
    let mut request = HttpRequest::new(HttpRequestBody::empty());
    *request.uri_mut() = url
        .parse()
        .map_err(|_| unfit("the registry has no possible URL"))?;
    *request.headers_mut() = headers;
    Ok(request)
}

fn header(text: &str) -> Result<HeaderValue, HttpError> {
    HeaderValue::from_str(text).map_err(|_| unfit("an answer has characters that no header has"))
}

fn secret_header(text: &str) -> Result<HeaderValue, HttpError> {
    let mut value = header(text)?;
    value.set_sensitive(true);
    Ok(value)
}

/// The error of a status that is no success.
async fn refusal(response: HttpResponse) -> HttpError {
    let (parts, body) = response.into_parts();
    let text = beginning(body).await.unwrap_or_default();
    let code = code_in(&text).or_else(|| manifest::code_in(&text));
    let status = parts.status;
    HttpError::new(HttpErrorKind::Unknown, Refusal { status, code })
}

/// All of a small answer.
async fn whole(response: HttpResponse) -> Result<Vec<u8>, HttpError> {
    if !response.status().is_success() {
        return Err(refusal(response).await);
    }
    let (_, mut body) = response.into_parts();
    let mut bytes = BytesMut::new();
    while let Some(frame) = body.frame().await {
        if let Ok(more) = frame?.into_data() {
            if bytes.len() + more.len() > ANSWER_MAX {
                return Err(unfit("an answer of the registry is too long"));
            }
            bytes.extend_from_slice(&more);
        }
    }
    Ok(bytes.to_vec())
}

/// The first and the last byte of a range as a request has it.
fn asked(headers: &HeaderMap) -> Option<(u64, u64)> {
    let range = headers.get(RANGE)?.to_str().ok()?.strip_prefix("bytes=")?;
    let (first, last) = range.split_once('-')?;
    Some((first.parse().ok()?, last.parse().ok()?))
}

fn empty(status: StatusCode) -> HttpError {
    HttpError::new(HttpErrorKind::Unknown, Refusal { status, code: None })
}

#[async_trait]
impl HttpService for Registry {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let blob = self.blob.get_or_try_init(|| self.find()).await?;
        let wanted = request.headers().get(IF_MATCH);
        if wanted.is_some_and(|wanted| wanted != blob.tag) {
            return Err(empty(StatusCode::PRECONDITION_FAILED));
        }
        let mut response = if request.method() == Method::HEAD {
            // All that is asked for is known.
            let mut response = Response::new(HttpResponseBody::from(bytes::Bytes::new()));
            response
                .headers_mut()
                .insert(CONTENT_LENGTH, blob.bytes.into());
            response
        } else {
            self.range(blob, &request).await?
        };
        let headers = response.headers_mut();
        headers.remove(LAST_MODIFIED);
        headers.insert(ETAG, blob.tag.clone());
        Ok(response)
    }
}

impl Registry {
    /// A range of the disk.
    async fn range(&self, blob: &Blob, request: &HttpRequest) -> Result<HttpResponse, HttpError> {
        let Some((first, last)) = asked(request.headers()) else {
            return Err(unfit("only ranges of a blob are read"));
        };
        if first >= blob.bytes {
            return Err(empty(StatusCode::RANGE_NOT_SATISFIABLE));
        }
        let last = last.min(blob.bytes - 1);
        let there = |at: u64| at + blob.offset;
        let mut moved = request.clone();
        *moved.uri_mut() = blob.uri.clone();
        let headers = moved.headers_mut();
        for condition in [IF_MATCH, IF_UNMODIFIED_SINCE] {
            headers.remove(condition);
        }
        headers.insert(
            RANGE,
            header(&format!("bytes={}-{}", there(first), there(last)))?,
        );
        let mut response = self.send(moved).await?;
        if !response.status().is_success() {
            return Err(refusal(response).await);
        }
        // A status of 200 is refused by who asked for a range.
        if response.status() == StatusCode::PARTIAL_CONTENT {
            let beginning = format!("bytes {}-{}/", there(first), there(last));
            let found = response.headers().get(CONTENT_RANGE);
            let found = found
                .and_then(|found| found.to_str().ok())
                .unwrap_or_default();
            if !found.starts_with(&beginning) {
                return Err(HttpError::new(
                    HttpErrorKind::Unknown,
                    Unmatched(found.chars().take(80).collect()),
                ));
            }
            let range = header(&format!("bytes {first}-{last}/{}", blob.bytes))?;
            response.headers_mut().insert(CONTENT_RANGE, range);
        }
        Ok(response)
    }
}

/// An answer about another range than the one that was asked for.
#[derive(Debug)]
struct Unmatched(String);

impl std::fmt::Display for Unmatched {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a wrong answer: '{}'", self.0.escape_default())
    }
}

impl std::error::Error for Unmatched {}
