//! Who takes part in the next step, and with how many tokens.

use std::cmp::Reverse;
use std::time::Duration;

use super::SchedulerOptions;
use crate::error::Error;

/// What a session could do next.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    /// Tokens of its prompt that it has not seen; 0 when it is decoding.
    pub(super) prompt: usize,
    pub(super) priority: i32,
    /// When it last took part, counted in steps.
    pub(super) last_step: u64,
}

/// Divides steps so that nobody waits for ever.
#[derive(Debug)]
pub(super) struct Agenda {
    /// Most tokens of a step.
    room: usize,
    while_decoding: usize,
    share: f64,
    /// Time that decoding is to have for itself before the next piece of a prompt.
    owed: Duration,
}

impl Agenda {
    pub(super) fn new(room: usize, options: &SchedulerOptions) -> Result<Self, Error> {
        let share = options.prefill_share;
        if !(share > 0.0 && share <= 1.0) {
            let expected = "above 0 and at most 1";
            return Err(Error::Scheduling { parameter: "prefill_share", found: share, expected });
        }
        let while_decoding = options.prefill_while_decoding;
        if while_decoding == 0 {
            let (parameter, expected) = ("prefill_while_decoding", "at least 1");
            return Err(Error::Scheduling { parameter, found: 0.0, expected });
        }
        Ok(Self { room, while_decoding, share, owed: Duration::ZERO })
    }

    /// Tokens of each session for the next step, 0 for those that are not in it. Somebody is, if
    /// there is anybody.
    ///
    /// Every session that decodes has a token, as far as there is room, those that waited longest
    /// first. What is left goes to prompts, unless those that decode are owed time: the one that waited
    /// longest has as long a piece as there is room for.
    pub(super) fn next(&self, needs: &[Need]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..needs.len()).collect();
        order.sort_by_key(|&i| (Reverse(needs[i].priority), needs[i].last_step, i));
        let (decoding, prefilling): (Vec<usize>, Vec<usize>) =
            order.into_iter().partition(|&i| needs[i].prompt == 0);
        let prefilling = match decoding.is_empty() || self.owed.is_zero() {
            true => prefilling,
            false => Vec::new(),
        };
        let mut tokens = vec![0; needs.len()];
        // A place for a prompt is kept free: otherwise many that decode would hold it up for ever.
        let kept = usize::from(!prefilling.is_empty());
        let mut left = self.room;
        for &session in decoding.iter().take(self.room - kept) {
            tokens[session] = 1;
            left -= 1;
        }
        if !decoding.is_empty() {
            left = left.min(self.while_decoding);
        }
        for session in prefilling {
            tokens[session] = needs[session].prompt.min(left);
            left -= tokens[session];
        }
        tokens
    }

    /// A step took so long: with tokens of prompts and a token each of some sessions, while so many
    /// in all were decoding.
    pub(super) fn took(&mut self, prompt: usize, written: usize, decoding: usize, time: Duration) {
        if decoding == 0 {
            self.owed = Duration::ZERO;
        } else if prompt == 0 {
            self.owed = self.owed.saturating_sub(time);
        } else {
            let for_prompts = prompt as f64 / (prompt + written) as f64;
            let owed = time.as_secs_f64() * for_prompts * (1.0 - self.share) / self.share;
            // A share next to nothing would owe more than any clock counts.
            let owed = Duration::try_from_secs_f64(owed).unwrap_or(Duration::MAX);
            self.owed = self.owed.saturating_add(owed);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn agenda(room: usize, options: SchedulerOptions) -> Agenda {
        Agenda::new(room, &options).unwrap()
    }

    fn need(prompt: usize, last_step: u64) -> Need {
        Need { prompt, priority: 0, last_step }
    }

    #[test]
    fn writers_have_a_token_each_and_a_prompt_a_short_piece() {
        let agenda = agenda(64, SchedulerOptions::default());
        let needs = [need(0, 1), need(100, 1), need(0, 1), need(5, 0)];
        // The short prompt has waited longer.
        assert_eq!(agenda.next(&needs), [1, 11, 1, 5]);
        assert_eq!(agenda.next(&[need(100, 0)]), [64], "alone it has a long one");
    }

    #[test]
    fn writers_are_given_back_the_time_that_a_prompt_took_from_them() {
        let mut agenda = agenda(64, SchedulerOptions::default());
        let needs = [need(0, 1), need(100, 1)];
        let second = Duration::from_secs(1);
        agenda.took(16, 1, 1, second * 17);
        for _ in 0..16 {
            assert_eq!(agenda.next(&needs), [1, 0]);
            agenda.took(0, 1, 1, second);
        }
        assert_eq!(agenda.next(&needs), [1, 16]);
        agenda.took(16, 1, 1, second * 17);
        assert_eq!(agenda.next(&needs[1..]), [64], "nobody writes any more");
        agenda.took(64, 0, 0, second * 60);
        assert_eq!(agenda.next(&needs), [1, 16], "nor is anybody owed anything");
    }

    #[test]
    fn a_higher_priority_goes_first_where_there_is_no_room_for_all() {
        let agenda = agenda(2, SchedulerOptions::default());
        let urgent = Need { priority: 1, ..need(0, 9) };
        assert_eq!(agenda.next(&[need(0, 1), urgent, need(0, 2)]), [1, 1, 0]);
    }

    #[test]
    fn options_that_make_no_sense_are_refused() {
        for prefill_share in [0.0, -1.0, 1.5, f64::NAN] {
            let options = SchedulerOptions { prefill_share, ..Default::default() };
            assert!(Agenda::new(8, &options).is_err());
        }
        let options = SchedulerOptions { prefill_while_decoding: 0, ..Default::default() };
        assert!(Agenda::new(8, &options).is_err());
    }

    proptest! {
        #[test]
        fn nobody_waits_longer_than_all_others_take(
            room in 1usize..12,
            mut prompts in prop::collection::vec(0usize..40, 1..10),
            share in 0.1f64..1.0,
            prompt_costs in 1u32..30,
        ) {
            let options = SchedulerOptions { prefill_share: share, ..Default::default() };
            let mut agenda = agenda(room, options);
            let mut last = vec![0u64; prompts.len()];
            // A prompt's piece owes at most this many steps of decoding.
            let most = prompts.len() as u64 * (2 + (30.0 * (1.0 - share) / share) as u64 * 2);
            for step in 1..400u64 {
                let needs: Vec<Need> =
                    prompts.iter().zip(&last).map(|(&p, &l)| need(p, l)).collect();
                let tokens = agenda.next(&needs);
                prop_assert!(tokens.iter().sum::<usize>() <= room);
                prop_assert!(tokens.iter().any(|&n| n > 0));
                let decoding = prompts.iter().filter(|&&p| p == 0).count();
                let (mut prompt, mut written) = (0, 0);
                for (i, &n) in tokens.iter().enumerate() {
                    if n == 0 {
                        prop_assert!(step - last[i] <= most, "{i} waits since {}", last[i]);
                        continue;
                    }
                    last[i] = step;
                    if prompts[i] == 0 {
                        prop_assert_eq!(n, 1);
                        written += 1;
                    } else {
                        prop_assert!(n <= prompts[i]);
                        prompts[i] -= n;
                        prompt += n;
                    }
                }
                let time = Duration::from_secs(if prompt > 0 { prompt_costs.into() } else { 1 });
                agenda.took(prompt, written, decoding, time);
            }
        }
    }
}
