//! `contrib/oci/Containerfile`, read: as much of the language as the file has. What is not known is
//! refused, so that an image which is made without Podman or Docker is theirs.

use std::collections::BTreeMap;

/// An image without its bytes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Recipe {
    /// Directories whose contents are the image's, each a layer.
    pub layers: Vec<Layer>,
    /// `NAME=VALUE`.
    pub environment: Vec<String>,
    pub labels: BTreeMap<String, String>,
    /// `USER:GROUP`, as numbers.
    pub user: String,
    pub directory: String,
    pub volumes: Vec<String>,
    pub stop_signal: String,
    pub entrypoint: Vec<String>,
    /// Arguments, unless others are given.
    pub command: Vec<String>,
}

/// A directory whose contents are copied into one of the image.
#[derive(Debug, PartialEq, Eq)]
pub struct Layer {
    pub from: String,
    /// Below the root, with a slash at its end; empty for the root itself.
    pub to: String,
    /// Number of the user and the group that have its files.
    pub owner: u32,
}

/// Reads a recipe.
///
/// # Errors
/// A line is of no known form; it is named.
pub fn parse(text: &str) -> Result<Recipe, String> {
    let mut recipe = Recipe::default();
    let lines = text.lines().enumerate();
    for (index, line) in lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')) {
        let (instruction, rest) = line.split_once(' ').unwrap_or((line, ""));
        recipe
            .follow(instruction, rest.trim())
            .ok_or_else(|| format!("line {} of the recipe is not understood: {line}", index + 1))?;
    }
    Ok(recipe)
}

impl Recipe {
    fn follow(&mut self, instruction: &str, rest: &str) -> Option<()> {
        match instruction {
            "FROM" if rest == "scratch" => {}
            "COPY" => self.layers.push(layer(rest)?),
            "ENV" => {
                let (name, value) = pair(rest)?;
                self.environment.push(format!("{name}={value}"));
            }
            "LABEL" => {
                let (name, value) = pair(rest)?;
                self.labels.insert(name, value);
            }
            "USER" => self.user = word(rest)?,
            "WORKDIR" => self.directory = word(rest)?,
            "STOPSIGNAL" => self.stop_signal = word(rest)?,
            "VOLUME" => self.volumes = words(rest)?,
            "ENTRYPOINT" => self.entrypoint = words(rest)?,
            "CMD" => self.command = words(rest)?,
            _ => return None,
        }
        Some(())
    }
}

/// `[--chown=ID:ID] DIRECTORY/ /[DIRECTORY/]`.
fn layer(rest: &str) -> Option<Layer> {
    let (owner, rest) = match rest.strip_prefix("--chown=") {
        None => (0, rest),
        Some(rest) => {
            let (owner, rest) = rest.split_once(' ')?;
            let (user, group) = owner.split_once(':')?;
            let user: u32 = user.parse().ok()?;
            (group.parse() == Ok(user)).then_some((user, rest))?
        }
    };
    let (from, to) = rest.split_once("/ /")?;
    let from = word(from)?;
    let to = match to {
        "" => String::new(),
        to => word(to).filter(|to| to.ends_with('/'))?,
    };
    Some(Layer { from, to, owner })
}

/// `NAME=VALUE`, the value in quotes or a word.
fn pair(rest: &str) -> Option<(String, String)> {
    let (name, value) = rest.split_once('=')?;
    let value = match value.starts_with('"') {
        true => serde_json::from_str(value).ok()?,
        false => word(value)?,
    };
    Some((word(name)?, value))
}

/// Plain characters, which mean themselves.
fn word(text: &str) -> Option<String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/:._-".contains(c);
    let is_word = !text.is_empty() && text.chars().all(is_plain);
    is_word.then(|| text.to_string())
}

/// A list in JSON, which no shell reads.
fn words(text: &str) -> Option<Vec<String>> {
    serde_json::from_str(text).ok()
}
