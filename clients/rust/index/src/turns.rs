//! Places for work of which callers that wait get one after the other, however much each asks.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// Of calls that wait those that are over are forgotten when there are so many, and when they doubled.
const FORGET_FROM: usize = 64;

/// So many places.
pub struct Turns {
    most: usize,
    /// Each caller leaves as many to others as it takes.
    leaves: bool,
    queues: Mutex<Queues>,
}

#[derive(Default)]
struct Queues {
    taken: HashMap<Arc<str>, usize>,
    count: usize,
    /// Of each caller that waits its calls; the caller that had a place last is the last. None of these may have one now.
    waiting: VecDeque<(Arc<str>, VecDeque<oneshot::Sender<Turn>>)>,
}

/// A place, until it is dropped.
pub struct Turn {
    turns: Arc<Turns>,
    caller: Arc<str>,
}

impl Turns {
    /// A caller has all that is free.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, leaves: false, queues: Mutex::default() })
    }

    /// A caller has as many as it leaves to others.
    pub fn shared(most: usize) -> Arc<Self> {
        Arc::new(Self { most, leaves: true, queues: Mutex::default() })
    }

    /// Waits until it is the caller's turn.
    pub async fn take(self: &Arc<Self>, caller: &Arc<str>) -> Turn {
        loop {
            let waits = {
                let mut queues = self.queues.lock();
                if self.may(&queues, caller) {
                    queues.add(caller);
                    return self.turn(caller);
                }
                let (gives, waits) = oneshot::channel();
                let calls = queues.of(caller);
                if calls.len() >= FORGET_FROM && calls.len().is_power_of_two() {
                    calls.retain(|call| !call.is_closed());
                }
                calls.push_back(gives);
                waits
            };
            if let Ok(turn) = waits.await {
                return turn;
            }
        }
    }

    fn may(&self, queues: &Queues, caller: &str) -> bool {
        let own = if self.leaves { queues.taken.get(caller).copied().unwrap_or(0) } else { 0 };
        own < self.most.saturating_sub(queues.count)
    }

    fn turn(self: &Arc<Self>, caller: &Arc<str>) -> Turn {
        Turn { turns: self.clone(), caller: caller.clone() }
    }

    /// Takes a place back: whoever may have one of those that are free now.
    fn next(&self, caller: &str) -> Vec<(Arc<str>, oneshot::Sender<Turn>)> {
        let mut queues = self.queues.lock();
        queues.remove(caller);
        let mut next = Vec::new();
        while let Some(at) = queues.waiting.iter().position(|(waits, _)| self.may(&queues, waits)) {
            let Some((caller, mut calls)) = queues.waiting.remove(at) else { break };
            if let Some(call) = pop_open(&mut calls) {
                queues.add(&caller);
                next.push((caller.clone(), call));
            }
            if !calls.is_empty() {
                queues.waiting.push_back((caller, calls));
            }
        }
        next
    }
}

fn pop_open(calls: &mut VecDeque<oneshot::Sender<Turn>>) -> Option<oneshot::Sender<Turn>> {
    std::iter::from_fn(|| calls.pop_front()).find(|call| !call.is_closed())
}

impl Queues {
    fn of(&mut self, caller: &Arc<str>) -> &mut VecDeque<oneshot::Sender<Turn>> {
        let known = self.waiting.iter().position(|(waits, _)| waits == caller);
        let at = known.unwrap_or_else(|| {
            self.waiting.push_back((caller.clone(), VecDeque::new()));
            self.waiting.len() - 1
        });
        &mut self.waiting[at].1
    }

    fn add(&mut self, caller: &Arc<str>) {
        self.count += 1;
        match self.taken.get_mut(caller) {
            Some(own) => *own += 1,
            None => drop(self.taken.insert(caller.clone(), 1)),
        }
    }

    fn remove(&mut self, caller: &str) {
        self.count -= 1;
        if let Some(own) = self.taken.get_mut(caller) {
            *own -= 1;
            if *own == 0 {
                self.taken.remove(caller);
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        for (caller, call) in self.turns.next(&self.caller) {
            // Where that call is over, it comes back and is dropped here: the next one has it.
            drop(call.send(self.turns.turn(&caller)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    fn now<F: Future>(future: F) -> Option<F::Output> {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        }
    }

    #[tokio::test]
    async fn callers_that_wait_have_one_after_the_other_however_many_calls_each_has() {
        let (turns, order) = (Turns::new(1), Arc::new(Mutex::new(Vec::new())));
        let first = turns.take(&"greedy".into()).await;
        let mut calls = Vec::new();
        for (number, caller) in ["greedy", "greedy", "greedy", "honest", "greedy", "honest"].into_iter().enumerate() {
            let (turns, order) = (turns.clone(), order.clone());
            calls.push(tokio::spawn(async move {
                let _turn = turns.take(&caller.into()).await;
                order.lock().push((caller, number));
            }));
            tokio::task::yield_now().await;
        }
        drop(first);
        for call in calls {
            call.await.unwrap();
        }
        let expected = [("greedy", 0), ("honest", 3), ("greedy", 1), ("honest", 5), ("greedy", 2), ("greedy", 4)];
        assert_eq!(*order.lock(), expected);
    }

    #[tokio::test]
    async fn a_caller_leaves_as_many_as_it_takes() {
        let (turns, one, other) = (Turns::shared(8), Arc::from("one"), Arc::from("other"));
        let of_one: Vec<Turn> = (0..4).filter_map(|_| now(turns.take(&one))).collect();
        assert!(of_one.len() == 4 && now(turns.take(&one)).is_none());
        let of_other: Vec<Turn> = (0..4).filter_map(|_| now(turns.take(&other))).collect();
        assert_eq!(of_other.len(), 2);
        drop(of_one);
        assert!(now(turns.take(&other)).is_some());
    }

    #[tokio::test]
    async fn a_call_that_is_over_keeps_nobody_from_a_place() {
        let (turns, one, other) = (Turns::new(1), Arc::from("one"), Arc::from("other"));
        let first = turns.take(&one).await;
        assert!(now(turns.take(&one)).is_none(), "it waited, and its caller left");
        let mut waits = Box::pin(turns.take(&other));
        assert!(now(waits.as_mut()).is_none());
        // Given, and its caller leaves before it looks.
        drop(first);
        drop(waits);
        assert!(now(turns.take(&one)).is_some());
        assert_eq!(turns.queues.lock().count, 0);
    }
}
