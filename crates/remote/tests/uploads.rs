//! Two uploads of one name that end at the same moment.

use std::collections::HashMap;
use std::sync::Arc;

use cowslip_block::{Job, Result};
use cowslip_remote::{
    Environment, ObjectUrl, PART_BYTES_MIN, StoreOptions, Upload, Uploaded, Verification, locate,
};
use cowslip_testbed::web::{WebFault, WebObject, WebRequest, WebServer};

use crate::support::{block_on, pattern};

/// Uploads an object of two parts to `s3://images/golden`.
fn upload(server: &WebServer, bytes: &[u8]) -> Result<Uploaded> {
    let environment: HashMap<&str, &str> = HashMap::from([
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_REGION", "us-east-1"),
    ]);
    let environment = environment.into_iter();
    let environment: Environment = environment
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .collect();
    let options = StoreOptions {
        endpoint: Some(server.url("").trim_end_matches('/').to_string()),
        ..StoreOptions::default()
    };
    let name = "s3://images/golden";
    let url = ObjectUrl::of_name(name).unwrap()?;
    let location = locate(&url, &options, &environment)?;
    block_on(async {
        let mut upload = Upload::begin(&location, name, PART_BYTES_MIN).await?;
        upload.push(bytes).await?;
        let way = (Verification::Bytes, &Job::default());
        upload.finish(b"", way).await
    })
}

fn completes(request: &WebRequest) -> bool {
    request.method == "POST" && request.target.contains("uploadId=")
}

#[test]
fn an_object_that_came_at_the_last_moment_is_not_replaced() {
    let server = Arc::new(WebServer::start().unwrap());
    let rival = pattern(100_000, 9);
    let (at, object) = (Arc::downgrade(&server), rival.clone());
    server.judge(move |request| {
        if completes(request)
            && let Some(server) = at.upgrade()
        {
            server.put("/images/golden", WebObject::tagged(object.clone(), "rival"));
        }
        WebFault::Nothing
    });
    let error = upload(&server, &pattern(9 << 20, 1))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("'s3://images/golden' exists already"),
        "{error}"
    );
    assert!(*server.object("/images/golden").unwrap() == rival);
    assert_eq!(server.uploads(), 0);
}

#[test]
fn a_store_without_that_condition_is_asked_without_it() {
    let server = WebServer::start().unwrap();
    server.judge(|request| {
        match completes(request) && request.headers.contains_key("if-none-match") {
            true => WebFault::Status(501, "<Error><Code>NotImplemented</Code></Error>".into()),
            false => WebFault::Nothing,
        }
    });
    let bytes = pattern(9 << 20, 1);
    upload(&server, &bytes).unwrap();
    assert!(*server.object("/images/golden").unwrap() == bytes);
}
