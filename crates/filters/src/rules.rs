//! The rules of `blkdebug`: which requests to a file fail, and with which error. Pure.
//!
//! A rule has an event. When the engine reaches that event, rules of kind `inject-error` become
//! active, in place of the active ones, and from then on requests that match them fail. Rules of
//! kind `set-state` change the state, which is a condition of other rules. So an error hits the
//! request that follows its event and, unless the rule has `once`, all later ones.

use std::ops::Range;

use cowslip_block::errno::EIO;
use cowslip_block::file::Event;
use cowslip_block::units::SECTOR_BYTES;
use cowslip_block::{Error, Result};

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoType {
    Read,
    Write,
    WriteZeroes,
    Discard,
    Flush,
    BlockStatus,
}

impl IoType {
    fn from_name(name: &str) -> Option<IoType> {
        Some(match name {
            "read" => IoType::Read,
            "write" => IoType::Write,
            "write-zeroes" => IoType::WriteZeroes,
            "discard" => IoType::Discard,
            "flush" => IoType::Flush,
            "block-status" => IoType::BlockStatus,
            _ => return None,
        })
    }
}

/// The effect of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Action {
    Inject {
        /// The error number; 0 makes nothing fail.
        errno: i32,
        /// The kind of request that fails; `None` is any kind except block status.
        io: Option<IoType>,
        /// The first byte of a sector; the rule applies only to requests that touch it.
        offset: Option<u64>,
        once: bool,
    },
    SetState(u64),
}

/// A rule: the event at which, and the state in which, it changes the state or injects an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    event: Event,
    /// The state in which the rule applies; 0 is any.
    state: u64,
    action: Action,
}

/// A rule as text: its kind and its settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuleText {
    /// `inject-error` or `set-state`.
    pub kind: String,
    /// The settings of the rule, by name, as the options give them.
    pub settings: Vec<(String, String)>,
}

impl RuleText {
    /// Parses the rules of a configuration file: groups of `name = "value"`.
    ///
    /// # Errors
    /// The first line that is invalid, or the first group of an unknown kind.
    pub fn all_of_file(text: &str) -> Result<Vec<RuleText>> {
        let mut rules: Vec<RuleText> = Vec::new();
        for line in text.lines() {
            let words = line.trim();
            if words.is_empty() || line.starts_with('#') {
                continue;
            }
            if let Some(group) = line.strip_prefix('[') {
                let kind = group.split_once(']').map_or(group, |(kind, _)| kind);
                if !matches!(kind, "inject-error" | "set-state") {
                    return Err(Error::Invalid(format!("There is no option group '{kind}'")));
                }
                rules.push(RuleText {
                    kind: kind.to_string(),
                    settings: Vec::new(),
                });
                continue;
            }
            let Some(rule) = rules.last_mut() else {
                return Err(Error::Invalid("no group defined".to_string()));
            };
            let (name, value) = setting(words);
            if !is_setting(&rule.kind, name) {
                return Err(Error::Invalid(format!("Invalid parameter '{name}'")));
            }
            rule.settings.push((name.to_string(), value.to_string()));
        }
        Ok(rules)
    }

    /// Parses the rule.
    ///
    /// # Errors
    /// A setting is missing or unknown, or its value is invalid.
    pub fn rule(&self) -> Result<Rule> {
        for (name, _) in &self.settings {
            if !is_setting(&self.kind, name) {
                return Err(Error::Invalid(format!(
                    "[{}] section doesn't support the option '{name}'",
                    self.kind
                )));
            }
        }
        let Some(event) = self.get("event") else {
            return Err(Error::Invalid("Missing event name for rule".to_string()));
        };
        let event = Event::from_name(event).ok_or_else(|| invalid(event))?;
        let state = self.number("state")?.unwrap_or(0);
        let action = match self.kind.as_str() {
            "set-state" => Action::SetState(self.number("new_state")?.unwrap_or(0)),
            _ => {
                self.switch("immediately")?;
                let errno = self.number("errno")?.unwrap_or(EIO as u64);
                let io = self.get("iotype");
                let io = io.map(|name| IoType::from_name(name).ok_or_else(|| invalid(name)));
                // QEMU writes -1 for no sector.
                let sector = match self.get("sector") {
                    Some("-1") => None,
                    _ => self.number("sector")?,
                };
                Action::Inject {
                    errno: i32::try_from(errno).map_err(|_| not_a_number("errno"))?,
                    io: io.transpose()?,
                    offset: sector.map(|sector| sector.saturating_mul(SECTOR_BYTES)),
                    once: self.switch("once")?,
                }
            }
        };
        Ok(Rule {
            event,
            state,
            action,
        })
    }

    fn get(&self, name: &str) -> Option<&str> {
        let mut found = self.settings.iter().rev();
        found
            .find(|(other, _)| other == name)
            .map(|(_, value)| value.as_str())
    }

    fn number(&self, name: &'static str) -> Result<Option<u64>> {
        let Some(text) = self.get(name) else {
            return Ok(None);
        };
        let digits = text.strip_prefix("0x");
        let number = match digits {
            Some(digits) => u64::from_str_radix(digits, 16),
            None => text.parse(),
        };
        number.map(Some).map_err(|_| not_a_number(name))
    }

    fn switch(&self, name: &'static str) -> Result<bool> {
        match self.get(name) {
            None | Some("off" | "no" | "false" | "n") => Ok(false),
            Some("on" | "yes" | "true" | "y") => Ok(true),
            Some(_) => Err(Error::Invalid(format!(
                "Parameter '{name}' expects 'on' or 'off'"
            ))),
        }
    }
}

/// The first word of a line, and the value in quotes behind its equals sign, if there is one.
fn setting(line: &str) -> (&str, &str) {
    let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let value = rest.trim_start().strip_prefix('=').map(str::trim_start);
    let value = value.and_then(|value| value.strip_prefix('"'));
    let value = value.map(|value| value.split('"').next().unwrap_or(value));
    (name, value.unwrap_or(""))
}

fn is_setting(kind: &str, name: &str) -> bool {
    match kind {
        "set-state" => matches!(name, "event" | "state" | "new_state"),
        _ => matches!(
            name,
            "event" | "state" | "errno" | "sector" | "once" | "immediately" | "iotype"
        ),
    }
}

fn invalid(value: &str) -> Error {
    Error::Invalid(format!("invalid parameter value: {value}"))
}

fn not_a_number(name: &str) -> Error {
    Error::Invalid(format!("Parameter '{name}' expects a number"))
}

/// The rules of a file and their state.
#[derive(Debug)]
pub struct RuleSet {
    rules: Vec<Option<Rule>>,
    /// Indices of the active rules in `rules`.
    active: Vec<usize>,
    state: u64,
}

impl RuleSet {
    /// Starts in state 1, with the rules of [`Event::None`] active.
    pub fn new(rules: Vec<Rule>) -> RuleSet {
        let mut set = RuleSet {
            rules: rules.into_iter().map(Some).collect(),
            active: Vec::new(),
            state: 1,
        };
        set.reached(Event::None);
        set
    }

    /// Activates the rules of an event that the engine has reached.
    pub fn reached(&mut self, event: Event) {
        let before = self.state;
        let mut injecting = Vec::new();
        for (place, rule) in self.rules.iter().enumerate() {
            let Some(rule) = rule else { continue };
            if rule.event != event || (rule.state != 0 && rule.state != before) {
                continue;
            }
            match rule.action {
                Action::Inject { .. } => injecting.push(place),
                Action::SetState(state) => self.state = state,
            }
        }
        if !injecting.is_empty() {
            self.active = injecting;
        }
    }

    /// The error number with which a request fails, if an active rule matches it. The range of a
    /// flush is empty.
    pub fn verdict(&mut self, io: IoType, bytes: Range<u64>) -> Option<i32> {
        let matches = |&place: &usize| match self.rules[place].as_ref().map(|rule| &rule.action) {
            Some(Action::Inject {
                io: wanted, offset, ..
            }) => {
                let usual = io != IoType::BlockStatus;
                wanted.map_or(usual, |wanted| wanted == io)
                    && offset.is_none_or(|offset| bytes.contains(&offset))
            }
            Some(Action::SetState(_)) | None => false,
        };
        let place = self.active.iter().copied().find(matches)?;
        let (errno, once) = match self.rules[place].as_ref()?.action {
            Action::Inject { errno, once, .. } => (errno, once),
            Action::SetState(_) => return None,
        };
        if errno == 0 {
            return None;
        }
        if once {
            self.rules[place] = None;
            self.active.retain(|&other| other != place);
        }
        Some(errno)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> std::result::Result<RuleSet, String> {
        let texts = RuleText::all_of_file(text).map_err(|error| error.to_string())?;
        let rules: Result<Vec<Rule>> = texts.iter().map(RuleText::rule).collect();
        Ok(RuleSet::new(rules.map_err(|error| error.to_string())?))
    }

    #[test]
    fn a_rule_hits_what_follows_its_event() {
        let text = "# faults\n[inject-error]\nevent = \"l2_load\"\nerrno = \"28\"\n";
        let mut always = set(text).unwrap();
        assert_eq!(always.verdict(IoType::Read, 0..512), None);
        always.reached(Event::L2Update);
        assert_eq!(always.verdict(IoType::Read, 0..512), None);
        always.reached(Event::L2Load);
        assert_eq!(always.verdict(IoType::Read, 0..512), Some(28));
        assert_eq!(always.verdict(IoType::Flush, 0..0), Some(28));
        assert_eq!(always.verdict(IoType::BlockStatus, 0..512), None);
        let mut once = set(&format!("{text}once = \"on\"\n")).unwrap();
        once.reached(Event::L2Load);
        assert_eq!(once.verdict(IoType::Read, 0..512), Some(28));
        once.reached(Event::L2Load);
        assert_eq!(once.verdict(IoType::Read, 0..512), None);
    }

    #[test]
    fn sectors_kinds_and_states_narrow_a_rule() {
        let text = "[inject-error]\nevent = \"none\"\nsector = \"2\"\niotype = \"write\"\n";
        let mut rules = set(text).unwrap();
        assert_eq!(rules.verdict(IoType::Write, 0..1024), None);
        assert_eq!(rules.verdict(IoType::Read, 1024..1536), None);
        assert_eq!(rules.verdict(IoType::Write, 512..2048), Some(EIO));
        let text = "[set-state]\nevent = \"read_aio\"\nnew_state = \"7\"\n\
            [inject-error]\nevent = \"read_aio\"\nstate = \"7\"\n";
        let mut rules = set(text).unwrap();
        rules.reached(Event::ReadAio);
        assert_eq!(
            rules.verdict(IoType::Read, 0..1),
            None,
            "the state of before"
        );
        rules.reached(Event::ReadAio);
        assert_eq!(rules.verdict(IoType::Read, 0..1), Some(EIO));
    }

    #[test]
    fn a_mistake_gives_one_line() {
        for (text, expected) in [
            ("junk\n", "no group defined"),
            ("[bogus]\n", "There is no option group 'bogus'"),
            ("[inject-error]\nfoo = \"1\"\n", "Invalid parameter 'foo'"),
            ("[inject-error]\n", "Missing event name for rule"),
            (
                "[inject-error]\nevent = l2_load\n",
                "invalid parameter value: ",
            ),
            (
                "[inject-error]\nevent = \"x\"\n",
                "invalid parameter value: x",
            ),
            (
                "[inject-error]\nevent = \"none\"\nerrno = \"99999999999\"\n",
                "Parameter 'errno' expects a number",
            ),
            (
                "[inject-error]\nevent = \"none\"\nonce = \"maybe\"\n",
                "Parameter 'once' expects 'on' or 'off'",
            ),
        ] {
            assert_eq!(set(text).map(|_| ()), Err(expected.to_string()), "{text}");
        }
    }
}
