//! Requests of S3 that change objects: `PUT`, `DELETE`, and uploads in parts.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::{Shared, WebObject, WebRequest, lock};

/// Shortest part, but for the last one, in bytes.
const PART_BYTES_MIN: usize = 5 << 20;

/// Uploads in parts that are going on.
#[derive(Default)]
pub struct Uploads {
    begun: u64,
    open: HashMap<String, Upload>,
}

struct Upload {
    path: String,
    parts: BTreeMap<u32, Vec<u8>>,
}

impl Uploads {
    /// Their number.
    pub fn open(&self) -> usize {
        self.open.len()
    }
}

type Answer = (String, Vec<u8>);

fn answer(status: u16, more: &str, body: &str) -> Answer {
    let len = body.len();
    let head = format!("HTTP/1.1 {status} x\r\nContent-Length: {len}\r\n{more}\r\n");
    (head, body.as_bytes().to_vec())
}

fn refused(status: u16, code: &str) -> Answer {
    answer(status, "", &format!("<Error><Code>{code}</Code></Error>"))
}

/// A tag of some bytes (FNV-1a), without its quotes.
fn tag(bytes: &[u8]) -> String {
    let add = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325, add);
    format!("{hash:016x}")
}

/// Does what a request asks for.
pub fn change(request: &WebRequest, content: Vec<u8>, shared: &Shared) -> Answer {
    let (path, query) = match request.target.split_once('?') {
        Some((path, query)) => (path, query),
        None => (request.target.as_str(), ""),
    };
    let query: HashMap<&str, &str> = query
        .split('&')
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
        .collect();
    let upload = query.get("uploadId").copied();
    match (request.method.as_str(), upload) {
        ("PUT", Some(id)) => put_part(id, query.get("partNumber").copied(), content, shared),
        ("PUT", None) => put(path, request, content, shared),
        ("POST", None) if query.contains_key("uploads") => begin(path, shared),
        ("POST", None) if query.contains_key("delete") => delete_all(path, &content, shared),
        ("POST", Some(id)) => complete(id, request, &content, shared),
        ("DELETE", Some(id)) => match lock(&shared.uploads).open.remove(id) {
            Some(_) => answer(204, "", ""),
            None => refused(404, "NoSuchUpload"),
        },
        ("DELETE", None) => {
            lock(&shared.objects).remove(path);
            answer(204, "", "")
        }
        _ => refused(405, "MethodNotAllowed"),
    }
}

/// Whether an object may be made only where there is none.
fn is_for_new(request: &WebRequest) -> bool {
    let tag = request.headers.get("if-none-match");
    tag.is_some_and(|tag| tag == "*")
}

fn put(path: &str, request: &WebRequest, content: Vec<u8>, shared: &Shared) -> Answer {
    let mut objects = lock(&shared.objects);
    if is_for_new(request) && objects.contains_key(path) {
        return refused(412, "PreconditionFailed");
    }
    let tag = tag(&content);
    objects.insert(path.to_string(), WebObject::tagged(content, &tag));
    answer(200, &format!("ETag: \"{tag}\"\r\n"), "")
}

/// Deletes the objects of a bucket whose names a request has.
fn delete_all(bucket: &str, content: &[u8], shared: &Shared) -> Answer {
    let text = String::from_utf8_lossy(content);
    let bucket = bucket.trim_end_matches('/');
    let mut deleted = String::new();
    for key in text.split("<Key>").skip(1) {
        let key = key.split('<').next().unwrap_or_default();
        lock(&shared.objects).remove(&format!("{bucket}/{key}"));
        deleted += &format!("<Deleted><Key>{key}</Key></Deleted>");
    }
    answer(200, "", &format!("<DeleteResult>{deleted}</DeleteResult>"))
}

fn begin(path: &str, shared: &Shared) -> Answer {
    let mut uploads = lock(&shared.uploads);
    uploads.begun += 1;
    let id = format!("upload-{}", uploads.begun);
    let upload = Upload {
        path: path.to_string(),
        parts: BTreeMap::new(),
    };
    uploads.open.insert(id.clone(), upload);
    let text = format!(
        "<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
    );
    answer(200, "", &text)
}

fn put_part(id: &str, number: Option<&str>, content: Vec<u8>, shared: &Shared) -> Answer {
    let number = number.and_then(|number| number.parse().ok());
    let Some(number) = number.filter(|number| (1..=10_000).contains(number)) else {
        return refused(400, "InvalidArgument");
    };
    match lock(&shared.uploads).open.get_mut(id) {
        None => refused(404, "NoSuchUpload"),
        Some(upload) => {
            let tag = tag(&content);
            upload.parts.insert(number, content);
            answer(200, &format!("ETag: \"{tag}\"\r\n"), "")
        }
    }
}

/// The parts that a request names have to be there, with their tags, in order.
fn complete(id: &str, request: &WebRequest, content: &[u8], shared: &Shared) -> Answer {
    let text = String::from_utf8_lossy(content);
    let named = |part: &str, name: &str| {
        let (_, rest) = part.split_once(&format!("<{name}>"))?;
        let (value, _) = rest.split_once("</")?;
        Some(value.replace("&quot;", "\"").trim_matches('"').to_string())
    };
    let wanted: Vec<(Option<u32>, Option<String>)> = text
        .split("<Part>")
        .skip(1)
        .map(|part| {
            let number = named(part, "PartNumber").and_then(|number| number.parse().ok());
            (number, named(part, "ETag"))
        })
        .collect();
    let mut uploads = lock(&shared.uploads);
    let Some(upload) = uploads.open.get(id) else {
        return refused(404, "NoSuchUpload");
    };
    let there = upload.parts.iter();
    let there: Vec<_> = there
        .map(|(number, part)| (Some(*number), Some(tag(part))))
        .collect();
    if wanted != there || wanted.is_empty() {
        return refused(400, "InvalidPart");
    }
    let last = upload.parts.len() - 1;
    let mut before = upload.parts.values().take(last);
    if before.any(|part| part.len() < PART_BYTES_MIN) {
        return refused(400, "EntityTooSmall");
    }
    let whole: Vec<u8> = upload.parts.values().flatten().copied().collect();
    let tag = format!("{}-{}", tag(&whole), last + 1);
    let path = upload.path.clone();
    if is_for_new(request) && lock(&shared.objects).contains_key(&path) {
        return refused(412, "PreconditionFailed");
    }
    uploads.open.remove(id);
    let object = WebObject {
        bytes: Arc::new(whole),
        ..WebObject::tagged(Vec::new(), &tag)
    };
    lock(&shared.objects).insert(path, object);
    let text = format!(
        "<CompleteMultipartUploadResult><ETag>\"{tag}\"</ETag></CompleteMultipartUploadResult>"
    );
    answer(200, "", &text)
}
