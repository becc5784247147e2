//! Ends a reply at the first of several stop texts.

/// Watches a stream of text for stop texts and holds back only what may still turn out to be one.
///
/// The match that starts earliest in the whole text wins, however the text is cut into pushes.
#[derive(Debug)]
pub struct StopMatcher {
    stops: Vec<Stop>,
    /// Text seen but not emitted.
    held: String,
    /// Start of the earliest complete match, in `held`.
    found: Option<usize>,
    stopped: bool,
}

/// What one push released.
#[derive(Debug, PartialEq, Eq)]
pub struct StopStep {
    /// Text that can be shown now.
    pub emit: String,
    /// Whether a stop text ended the reply; from then on nothing more is emitted.
    pub stopped: bool,
}

impl StopMatcher {
    /// Watches for `stops`; empty ones are ignored.
    pub fn new(stops: Vec<String>) -> Self {
        let stops = stops.into_iter().filter(|text| !text.is_empty()).map(Stop::new).collect();
        StopMatcher { stops, held: String::new(), found: None, stopped: false }
    }

    /// Takes the next text and releases what cannot be part of a stop text, without the stop text itself.
    pub fn push(&mut self, text: &str) -> StopStep {
        if self.stopped {
            return StopStep { emit: String::new(), stopped: true };
        }
        let mut seen = self.held.len();
        self.held.push_str(text);
        for &byte in text.as_bytes() {
            seen += 1;
            for stop in &mut self.stops {
                if stop.advance(byte) {
                    let start = seen - stop.text.len();
                    self.found = Some(self.found.map_or(start, |found| found.min(start)));
                }
            }
            // A longer stop text that started earlier may still complete: wait until none can.
            if let Some(found) = self.found
                && found <= self.earliest_open(seen)
            {
                self.stopped = true;
                self.held.truncate(found);
                return StopStep { emit: std::mem::take(&mut self.held), stopped: true };
            }
        }
        let release = self.earliest_open(seen);
        let emit: String = self.held.drain(..release).collect();
        self.found = self.found.map(|found| found - release);
        StopStep { emit, stopped: false }
    }

    /// The reply ended, call this last: releases what was held back, up to a stop text if one is in it.
    pub fn finish(&mut self) -> String {
        if let Some(found) = self.found {
            self.held.truncate(found);
        }
        std::mem::take(&mut self.held)
    }

    /// Start in `held` of the earliest match that is begun but not complete; `seen` if there is none.
    fn earliest_open(&self, seen: usize) -> usize {
        // A stop text starts with a character's first byte, so this is a character boundary of `held`.
        self.stops.iter().map(|stop| seen - stop.matched_bytes).min().unwrap_or(seen)
    }
}

/// One stop text and how much of it the text so far ends with (Knuth-Morris-Pratt: constant work per byte).
#[derive(Debug)]
struct Stop {
    text: Vec<u8>,
    /// `fallback[n]`: longest proper prefix of `text` that the first `n + 1` bytes end with.
    fallback: Vec<usize>,
    matched_bytes: usize,
}

impl Stop {
    fn new(text: String) -> Self {
        let text = text.into_bytes();
        let mut fallback = vec![0; text.len()];
        for n in 1..text.len() {
            fallback[n] = longer_prefix(&text, &fallback, fallback[n - 1], text[n]);
        }
        Stop { text, fallback, matched_bytes: 0 }
    }

    /// Takes one byte; true when it completes the stop text.
    fn advance(&mut self, byte: u8) -> bool {
        self.matched_bytes = longer_prefix(&self.text, &self.fallback, self.matched_bytes, byte);
        let complete = self.matched_bytes == self.text.len();
        if complete {
            self.matched_bytes = self.fallback[self.matched_bytes - 1];
        }
        complete
    }
}

/// The longest prefix of `text` that ends in `byte`, given that the bytes before end in a prefix of `matched` bytes.
fn longer_prefix(text: &[u8], fallback: &[usize], mut matched: usize, byte: u8) -> usize {
    while matched > 0 && text[matched] != byte {
        matched = fallback[matched - 1];
    }
    if text[matched] == byte { matched + 1 } else { matched }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn matcher(stops: &[&str]) -> StopMatcher {
        StopMatcher::new(stops.iter().map(|s| s.to_string()).collect())
    }

    fn step(emit: &str, stopped: bool) -> StopStep {
        StopStep { emit: emit.to_string(), stopped }
    }

    #[test]
    fn only_a_possible_prefix_is_held_back() {
        let mut m = matcher(&["STOP"]);
        assert_eq!(m.push("one S"), step("one ", false));
        assert_eq!(m.push("TO"), step("", false));
        assert_eq!(m.push("x ST"), step("STOx ", false));
        assert_eq!(m.push("OP tail"), step("", true));
        assert_eq!(m.push("more"), step("", true));
        assert_eq!(m.finish(), "");
    }

    #[test]
    fn an_earlier_start_beats_an_earlier_end() {
        let mut m = matcher(&["bc", "abcd"]);
        assert_eq!(m.push("xabc"), step("x", false));
        assert_eq!(m.push("d"), step("", true));
        let mut m = matcher(&["bc", "abcd"]);
        assert_eq!(m.push("xabc"), step("x", false));
        assert_eq!(m.push("e"), step("a", true));
        let mut m = matcher(&["bc", "abcd"]);
        assert_eq!(m.push("xabc"), step("x", false));
        assert_eq!(m.finish(), "a");
    }

    #[test]
    fn what_was_held_is_released_at_the_end() {
        let mut m = matcher(&["\n\n", ""]);
        assert_eq!(m.push("é\n"), step("é", false));
        assert_eq!(m.finish(), "\n");
    }

    fn naive(stops: &[String], text: &str) -> (String, bool) {
        match stops.iter().filter(|s| !s.is_empty()).filter_map(|s| text.find(s.as_str())).min() {
            Some(start) => (text[..start].to_string(), true),
            None => (text.to_string(), false),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]
        #[test]
        fn pushes_agree_with_a_search_of_the_whole_text(
            stops in proptest::collection::vec("[abé]{0,5}", 0..4),
            pushes in proptest::collection::vec("[abcé]{0,4}", 0..10),
        ) {
            let text = pushes.concat();
            let (expected, found) = naive(&stops, &text);
            let mut m = StopMatcher::new(stops.clone());
            let mut shown = String::new();
            let mut seen = String::new();
            for push in &pushes {
                let step = m.push(push);
                shown.push_str(&step.emit);
                seen.push_str(push);
                prop_assert!(!step.stopped || found);
                if !step.stopped && m.found.is_none() {
                    let held = &seen[shown.len()..];
                    prop_assert!(held.is_empty() || stops.iter().any(|s| s.starts_with(held)), "{held:?} is held");
                }
            }
            shown.push_str(&m.finish());
            prop_assert_eq!(shown, expected);
        }
    }
}
