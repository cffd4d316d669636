//! Credentials of Amazon's programs: `~/.aws/credentials` and `~/.aws/config`.
//!
//! Files are looked at for each request, and read again when they have changed: programs that
//! renew short-lived credentials write them there.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use async_trait::async_trait;
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;

use crate::environment::Environment;

/// The keys of a profile in Amazon's files, if it has any.
#[derive(Debug)]
pub(crate) struct ProfileCredentials {
    files: [PathBuf; 2],
    profile: String,
    last: Mutex<Option<Known>>,
}

#[derive(Debug)]
struct Known {
    changed: [Option<SystemTime>; 2],
    credential: Arc<AwsCredential>,
}

/// A profile of Amazon's files.
#[derive(Debug, Default)]
pub(crate) struct Profile {
    /// The region, if the profile names one.
    pub region: Option<String>,
    /// The endpoint, if the profile names one.
    pub endpoint: Option<String>,
    /// Its keys, if it has any.
    pub credentials: Option<Arc<ProfileCredentials>>,
}

impl Profile {
    /// The profile that the environment names, or the default one.
    pub(crate) fn of(environment: &Environment) -> Profile {
        let credentials = environment.file("AWS_SHARED_CREDENTIALS_FILE", ".aws/credentials");
        let config = environment.file("AWS_CONFIG_FILE", ".aws/config");
        let (Some(credentials), Some(config)) = (credentials, config) else {
            return Profile::default();
        };
        let name = environment.get("AWS_PROFILE").unwrap_or("default");
        let files = [credentials, config];
        let said = values(&files, name);
        let keys = ProfileCredentials {
            files,
            profile: name.to_string(),
            last: Mutex::new(None),
        };
        Profile {
            region: said.get("region").cloned(),
            endpoint: said.get("endpoint_url").cloned(),
            credentials: keys.read().is_some().then(|| Arc::new(keys)),
        }
    }
}

impl ProfileCredentials {
    fn read(&self) -> Option<Arc<AwsCredential>> {
        let time = |path: &PathBuf| std::fs::metadata(path).and_then(|it| it.modified()).ok();
        let changed = [time(&self.files[0]), time(&self.files[1])];
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = last.as_ref().filter(|known| known.changed == changed) {
            return Some(Arc::clone(&known.credential));
        }
        let mut said = values(&self.files, &self.profile);
        let credential = Arc::new(AwsCredential {
            key_id: said.remove("aws_access_key_id")?,
            secret_key: said.remove("aws_secret_access_key")?,
            token: said.remove("aws_session_token"),
        });
        *last = Some(Known {
            changed,
            credential: Arc::clone(&credential),
        });
        Some(credential)
    }
}

#[async_trait]
impl CredentialProvider for ProfileCredentials {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        self.read().ok_or_else(|| object_store::Error::Generic {
            store: "S3",
            source: format!(
                "'{}' has no keys of the profile '{}'",
                self.files[0].display(),
                self.profile
            )
            .into(),
        })
    }
}

/// The values that the files have for a profile; the first one counts.
fn values(files: &[PathBuf; 2], profile: &str) -> BTreeMap<String, String> {
    let [credentials, config] = files;
    let named = format!("profile {profile}");
    let mut all = section(config, &[profile, &named]);
    all.extend(section(credentials, &[profile]));
    all
}

/// Bytes of such a file at most: it is a page of text.
const FILE_MAX: u64 = 1 << 20;

/// The values in the sections of these names.
fn section(file: &Path, names: &[&str]) -> BTreeMap<String, String> {
    use std::io::Read;
    let mut text = String::new();
    let read = std::fs::File::open(file)
        .and_then(|opened| opened.take(FILE_MAX).read_to_string(&mut text));
    if read.is_err() {
        // No such file, as on most hosts: other sources of credentials follow.
        return BTreeMap::new();
    }
    let mut is_meant = false;
    let mut values = BTreeMap::new();
    for line in text.lines() {
        // Lines that are set in belong to the value before them.
        let is_nested = line.starts_with([' ', '\t']);
        let line = line.trim();
        if line.is_empty() || line.starts_with(['#', ';']) || is_nested {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|it| it.strip_suffix(']')) {
            is_meant = names.contains(&name.trim());
        } else if let (true, Some((name, value))) = (is_meant, line.split_once('=')) {
            values.insert(name.trim().to_ascii_lowercase(), value.trim().to_string());
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(home: &Path, more: &[(&str, &str)]) -> Environment {
        let home = ("HOME".to_string(), home.to_str().unwrap().to_string());
        let more = more.iter();
        let more = more.map(|(name, value)| (name.to_string(), value.to_string()));
        [home].into_iter().chain(more).collect()
    }

    #[test]
    fn profiles_are_found_in_both_files_and_read_again_when_renewed() {
        let home = tempfile::tempdir().unwrap();
        let aws = home.path().join(".aws");
        std::fs::create_dir(&aws).unwrap();
        assert!(
            Profile::of(&environment(home.path(), &[]))
                .credentials
                .is_none()
        );
        let keys = |secret: &str| {
            format!(
                "[default]\naws_access_key_id = A\naws_secret_access_key={secret}\n\
                 [ci]\n# none\n\taws_access_key_id = nested\n"
            )
        };
        std::fs::write(aws.join("credentials"), keys("one")).unwrap();
        std::fs::write(
            aws.join("config"),
            "[default]\nregion = eu-central-1\n\
             [profile ci]\nregion=us-west-2\nendpoint_url = http://minio\n",
        )
        .unwrap();
        let profile = Profile::of(&environment(home.path(), &[]));
        assert_eq!(profile.region.as_deref(), Some("eu-central-1"));
        let found = profile.credentials.unwrap();
        assert_eq!(found.read().unwrap().secret_key, "one");
        std::fs::write(aws.join("credentials"), keys("renewed")).unwrap();
        let later = SystemTime::now() + std::time::Duration::from_secs(5);
        let file = std::fs::File::open(aws.join("credentials")).unwrap();
        file.set_modified(later).unwrap();
        assert_eq!(found.read().unwrap().secret_key, "renewed");

        let profile = Profile::of(&environment(home.path(), &[("AWS_PROFILE", "ci")]));
        assert_eq!(profile.region.as_deref(), Some("us-west-2"));
        assert_eq!(profile.endpoint.as_deref(), Some("http://minio"));
        assert!(profile.credentials.is_none());
    }
}
