//! One account of memory: whoever takes much of it holds a lease, and the sum of all leases never
//! passes the budget.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A budget of bytes and who holds how much of it. Clones are the same account.
///
/// A ledger counts, it does not allocate: take the lease first, then the memory, and give the
/// memory back before the lease is dropped.
#[derive(Clone, Debug)]
pub struct Ledger {
    account: Arc<Account>,
}

#[derive(Debug)]
struct Account {
    budget_bytes: u64,
    /// Leases come and go a few times per request, so a lock costs nothing that could be measured.
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    total_bytes: u64,
    peak_bytes: u64,
    by_purpose: BTreeMap<&'static str, u64>,
}

impl Ledger {
    /// An account of `budget_bytes`, of which nothing is held.
    pub fn new(budget_bytes: u64) -> Self {
        Self { account: Arc::new(Account { budget_bytes, held: Mutex::default() }) }
    }

    /// Takes `bytes` for a purpose until the lease is dropped. Several leases may have the same
    /// purpose; the report adds them up.
    ///
    /// # Errors
    /// [`OverBudget`] when less than that is free. Nothing is taken then.
    pub fn lease(&self, purpose: &'static str, bytes: u64) -> Result<Lease, OverBudget> {
        self.take(purpose, bytes)?;
        Ok(Lease { ledger: self.clone(), purpose, bytes })
    }

    /// Bytes that may be held in all.
    pub fn budget_bytes(&self) -> u64 {
        self.account.budget_bytes
    }

    /// Bytes that are held.
    pub fn held_bytes(&self) -> u64 {
        self.lock().total_bytes
    }

    /// The most bytes that were held at once.
    pub fn peak_bytes(&self) -> u64 {
        self.lock().peak_bytes
    }

    /// Bytes that can still be leased.
    pub fn free_bytes(&self) -> u64 {
        self.account.budget_bytes - self.held_bytes()
    }

    /// Bytes held for each purpose, in alphabetical order; those that hold nothing are left out.
    pub fn held(&self) -> Vec<(&'static str, u64)> {
        self.lock().list()
    }

    fn take(&self, purpose: &'static str, bytes: u64) -> Result<(), OverBudget> {
        let budget_bytes = self.account.budget_bytes;
        let mut held = self.lock();
        match held.total_bytes.checked_add(bytes).filter(|total| *total <= budget_bytes) {
            Some(total) => {
                held.total_bytes = total;
                held.peak_bytes = held.peak_bytes.max(total);
                *held.by_purpose.entry(purpose).or_default() += bytes;
                Ok(())
            }
            None => Err(OverBudget {
                purpose,
                asked_bytes: bytes,
                held: held.list(),
                held_bytes: held.total_bytes,
                budget_bytes,
            }),
        }
    }

    fn give_back(&self, purpose: &'static str, bytes: u64) {
        let mut held = self.lock();
        held.total_bytes -= bytes;
        *held.by_purpose.entry(purpose).or_default() -= bytes;
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        // Nothing that can panic happens between the steps of a change.
        self.account.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held {
    fn list(&self) -> Vec<(&'static str, u64)> {
        let entries = self.by_purpose.iter().map(|(&purpose, &bytes)| (purpose, bytes));
        entries.filter(|(_, bytes)| *bytes > 0).collect()
    }
}

/// Some bytes of a [`Ledger`], given back when dropped.
#[derive(Debug)]
pub struct Lease {
    ledger: Ledger,
    purpose: &'static str,
    bytes: u64,
}

impl Lease {
    /// Bytes it holds.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What they are for.
    pub fn purpose(&self) -> &'static str {
        self.purpose
    }

    /// Takes `more` bytes as well.
    ///
    /// # Errors
    /// [`OverBudget`] when less than that is free. The lease stays as it is then.
    pub fn grow(&mut self, more: u64) -> Result<(), OverBudget> {
        self.ledger.take(self.purpose, more)?;
        self.bytes += more;
        Ok(())
    }

    /// Gives `fewer` bytes back, all of them if it holds no more than that.
    pub fn shrink(&mut self, fewer: u64) {
        let fewer = fewer.min(self.bytes);
        self.bytes -= fewer;
        self.ledger.give_back(self.purpose, fewer);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.ledger.give_back(self.purpose, self.bytes);
    }
}

/// A lease was refused: the budget is a ceiling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverBudget {
    /// What the bytes were for.
    pub purpose: &'static str,
    /// Bytes that were asked for.
    pub asked_bytes: u64,
    /// Bytes that were held for each purpose, in alphabetical order.
    pub held: Vec<(&'static str, u64)>,
    /// Their sum.
    pub held_bytes: u64,
    /// Bytes that may be held in all.
    pub budget_bytes: u64,
}

impl std::error::Error for OverBudget {}

impl fmt::Display for OverBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { purpose, asked_bytes, held, held_bytes, budget_bytes } = self;
        write!(
            f,
            "{purpose} needs {asked_bytes} bytes, but {held_bytes} of the memory budget of \
             {budget_bytes} are held"
        )?;
        for (i, (purpose, bytes)) in held.iter().enumerate() {
            write!(f, "{} {purpose} {bytes}", if i == 0 { ":" } else { "," })?;
        }
        f.write_str("; raise the budget, or ask for a shorter context")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_lease_is_given_back_when_dropped() {
        let ledger = Ledger::new(100);
        let trunk = ledger.lease("trunk", 60).unwrap();
        let slots = ledger.lease("expert slots", 40).unwrap();
        assert_eq!((ledger.held_bytes(), ledger.free_bytes()), (100, 0));
        assert_eq!(ledger.held(), [("expert slots", 40), ("trunk", 60)]);
        drop(trunk);
        assert_eq!(ledger.held(), [("expert slots", 40)]);
        drop(slots);
        assert_eq!((ledger.held_bytes(), ledger.free_bytes(), ledger.peak_bytes()), (0, 100, 100));
        assert_eq!(ledger.held(), []);
    }

    #[test]
    fn a_refusal_names_purpose_holders_and_budget_and_takes_nothing() {
        let ledger = Ledger::new(100);
        let _trunk = ledger.lease("trunk", 60).unwrap();
        let refused = ledger.lease("scratch", 41).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "scratch needs 41 bytes, but 60 of the memory budget of 100 are held: trunk 60; raise \
             the budget, or ask for a shorter context"
        );
        assert_eq!(ledger.held_bytes(), 60);
        assert_eq!(ledger.lease("scratch", u64::MAX).unwrap_err().asked_bytes, u64::MAX);
        assert_eq!(ledger.lease("scratch", 40).unwrap().bytes(), 40);
    }

    #[test]
    fn a_lease_grows_only_within_the_budget() {
        let ledger = Ledger::new(100);
        let mut cache = ledger.lease("latent cache", 10).unwrap();
        cache.grow(90).unwrap();
        assert_eq!(cache.grow(1).unwrap_err().held_bytes, 100);
        assert_eq!(cache.bytes(), 100);
        cache.shrink(30);
        assert_eq!((cache.bytes(), ledger.free_bytes()), (70, 30));
        cache.shrink(1000);
        assert_eq!((cache.bytes(), ledger.free_bytes()), (0, 100));
        drop(cache);
        assert_eq!(ledger.free_bytes(), 100);
    }

    #[test]
    fn clones_share_one_account_and_two_ledgers_do_not() {
        let (a, b) = (Ledger::new(10), Ledger::new(10));
        let _lease = a.clone().lease("trunk", 10).unwrap();
        assert!(a.lease("trunk", 1).is_err());
        assert!(b.lease("trunk", 10).is_ok());
    }

    /// Something a holder of leases does.
    #[derive(Clone, Copy, Debug)]
    enum Act {
        Lease(u64),
        Drop(usize),
        Grow(usize, u64),
        Shrink(usize, u64),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            3 => (0..400u64).prop_map(Act::Lease),
            2 => any::<usize>().prop_map(Act::Drop),
            1 => (any::<usize>(), 0..200u64).prop_map(|(i, n)| Act::Grow(i, n)),
            1 => (any::<usize>(), 0..200u64).prop_map(|(i, n)| Act::Shrink(i, n)),
        ]
    }

    /// Carries out the acts and returns the leases that are left.
    fn perform(ledger: &Ledger, acts: &[Act]) -> Vec<Lease> {
        let mut leases: Vec<Lease> = Vec::new();
        for &act in acts {
            let n = leases.len().max(1);
            match act {
                Act::Lease(bytes) => leases.extend(ledger.lease("test", bytes)),
                Act::Drop(i) if !leases.is_empty() => drop(leases.swap_remove(i % n)),
                Act::Grow(i, more) => {
                    let _ = leases.get_mut(i % n).map(|lease| lease.grow(more));
                }
                Act::Shrink(i, fewer) => {
                    let _ = leases.get_mut(i % n).map(|lease| lease.shrink(fewer));
                }
                Act::Drop(_) => {}
            }
            assert!(ledger.held_bytes() <= ledger.budget_bytes());
        }
        leases
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

        #[test]
        fn the_sum_is_that_of_the_leases_and_never_passes_the_budget(
            acts in prop::collection::vec(prop::collection::vec(act(), 0..60), 4)
        ) {
            let ledger = Ledger::new(1000);
            let left: Vec<Lease> = std::thread::scope(|scope| {
                let threads: Vec<_> =
                    acts.iter().map(|acts| scope.spawn(|| perform(&ledger, acts))).collect();
                threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
            });
            prop_assert!(ledger.peak_bytes() <= 1000);
            prop_assert_eq!(ledger.held_bytes(), left.iter().map(Lease::bytes).sum::<u64>());
            drop(left);
            prop_assert_eq!(ledger.held_bytes(), 0);
        }
    }
}
