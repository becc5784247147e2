//! Names of beginnings: whoever has the name space and the tokens finds them, and nobody else can tell
//! what they are of.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// What a file is called: how many tokens it is of, and a digest of them that is keyed with the name
/// space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name {
    // First, so that names are in the order of their lengths.
    pub(super) tokens: usize,
    digest: [u8; 32],
}

/// Names ever longer beginnings of some tokens, for one name space and model.
pub(super) struct Namer {
    tokens: usize,
    mac: Hmac<Sha256>,
}

impl Namer {
    pub(super) fn new(namespace: &str, model: &str) -> Self {
        let mut mac =
            Hmac::new_from_slice(namespace.as_bytes()).expect("HMAC takes keys of any length");
        // So that a key that is used elsewhere too says nothing here of what it signed there.
        mac.update(b"a beginning kept by rill\0");
        mac.update(model.as_bytes());
        mac.update(b"\0");
        Self { tokens: 0, mac }
    }

    pub(super) fn push(&mut self, tokens: &[u32]) {
        self.tokens += tokens.len();
        tokens.iter().for_each(|token| self.mac.update(&token.to_le_bytes()));
    }

    /// Of all that was pushed so far.
    pub(super) fn name(&self) -> Name {
        Name { tokens: self.tokens, digest: self.mac.clone().finalize().into_bytes().into() }
    }
}

impl Name {
    /// The name in a file's name, if it is one.
    pub(super) fn parse(file: &str) -> Option<Self> {
        let (digest, tokens) = file.strip_suffix(SUFFIX)?.split_once('-')?;
        let mut name = Self { tokens: tokens.parse().ok()?, digest: [0; 32] };
        for (byte, digits) in name.digest.iter_mut().zip(digest.as_bytes().chunks(2)) {
            *byte = u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()?;
        }
        // There is one way to write a name.
        (name.to_string() == file).then_some(name)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.digest.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        write!(f, "-{}{SUFFIX}", self.tokens)
    }
}

const SUFFIX: &str = ".prefix";

#[cfg(test)]
mod tests {
    use super::*;

    fn name(namespace: &str, model: &str, tokens: &[u32]) -> Name {
        let mut namer = Namer::new(namespace, model);
        namer.push(tokens);
        namer.name()
    }

    #[test]
    fn a_name_depends_on_name_space_model_and_tokens_and_not_on_pieces() {
        let one = name("alice", "model", &[1, 2, 3]);
        let others = [
            name("bob", "model", &[1, 2, 3]),
            name("alice", "other", &[1, 2, 3]),
            name("alice", "model", &[1, 2, 4]),
            name("alice", "model", &[1, 2]),
            name("alice", "model", &[1, 2, 3, 0]),
        ];
        assert!(!others.contains(&one));
        assert!(others.iter().all(|other| other.digest != one.digest));
        let mut namer = Namer::new("alice", "model");
        namer.push(&[1]);
        assert_eq!(namer.name().tokens, 1);
        namer.push(&[2, 3]);
        assert_eq!(namer.name(), one);
    }

    #[test]
    fn names_are_read_as_they_are_written_and_no_other_way() {
        let one = name("alice", "model", &[1; 30]);
        let text = one.to_string();
        assert_eq!(Name::parse(&text), Some(one));
        for wrong in [
            text.replace("-30.", "-030."),
            text.replace("-30.", "-+30."),
            text.replace("-30.", "-99999999999999999999999."),
            text.replace("-30.", "."),
            text.replace(".prefix", ".part"),
            text[2..].to_owned(),
            format!("00{text}"),
            text.to_uppercase(),
            format!("+1{}", &text[2..]),
            format!("ä{}", &text[2..]),
            "-1.prefix".to_owned(),
            String::new(),
        ] {
            assert_eq!(Name::parse(&wrong), None, "{wrong}");
        }
    }
}
