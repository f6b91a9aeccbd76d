//! Places for the requests of one call, before anything is done for any of them: all get in or none. What the nodes
//! would need for a first token is asked here, once for each prompt, where there is a time to compare it with.
use std::sync::Arc;
use std::time::Instant;

use tandem_proto::{Error, ErrorKind};
use tandem_telemetry::clock;

use super::{Shared, check, refusal};
use crate::admission::{Ask, Entered, Reason, Refusal, Tenant};
use crate::capacity::Predicted;
use crate::generation::GenerationRequest;
use crate::limits::Limits;
use crate::select::Wish;

/// Checks the requests of one tenant and takes their places.
///
/// # Errors
/// As [`crate::api::Service::generate`].
pub fn all(shared: &Shared, requests: &[GenerationRequest]) -> Result<Vec<Entered>, Error> {
    let checked = requests.iter().try_for_each(|request| check::check(request, &shared.model));
    checked
        .and_then(|()| few_enough(shared, requests.len()))
        .and_then(|()| enter(shared, requests))
        .inspect_err(|error| shared.metrics.refused(error.kind))
}

/// Whether any request of the tenant could start or wait now, asked before one is read; takes nothing.
///
/// # Errors
/// As [`all`], of what does not depend on the request.
pub fn may_enter(shared: &Shared, tenant: &Tenant) -> Result<(), Error> {
    shared.admission.may_enter(tenant, clock::now()).map_err(|refusal| turned_away(shared, refusal))
}

/// Takes one request from the tenant's rates.
///
/// # Errors
/// As [`may_enter`].
pub fn charge(shared: &Shared, tenant: &Tenant) -> Result<(), Error> {
    shared.admission.charge(tenant, clock::now()).map_err(|refusal| turned_away(shared, refusal))
}

fn turned_away(shared: &Shared, Refusal { reason, error }: Refusal) -> Error {
    shared.metrics.turned_away(reason.as_str());
    error
}

/// When the request ends at the latest.
pub fn deadline(limits: &Limits, request: &GenerationRequest) -> Instant {
    let limit = request.received + limits.max_request;
    request.deadline.map_or(limit, |deadline| deadline.min(limit))
}

/// More than run and wait at a time never get in together: another try would be of no use.
fn few_enough(shared: &Shared, requests: usize) -> Result<(), Error> {
    let most = shared.admission.most_requests();
    if requests > most {
        let message = format!("{requests} answers are asked for at once; this router takes {most} of all its clients");
        return Err(Error::invalid("n", message));
    }
    Ok(())
}

fn enter(shared: &Shared, requests: &[GenerationRequest]) -> Result<Vec<Entered>, Error> {
    let Some(first) = requests.first() else { return Ok(Vec::new()) };
    let now = clock::now();
    let entered = match shared.membership.has_pair() {
        true => shared.admission.enter_all(&first.tenant, asks(shared, requests, now), now),
        false => Err(Refusal { reason: Reason::NoPair, error: no_pair(shared, now) }),
    };
    entered.map_err(|refusal| turned_away(shared, refusal))
}

fn asks(shared: &Shared, requests: &[GenerationRequest], now: Instant) -> Vec<Ask> {
    let limits = shared.limits.get();
    // Answers to one prompt stand side by side.
    let mut last: Option<(&GenerationRequest, Option<Predicted>)> = None;
    let asks = requests.iter().map(|request| {
        let same = last
            .filter(|(other, _)| (other.max_tokens, &other.prompt_ids) == (request.max_tokens, &request.prompt_ids));
        let predicted = same.map_or_else(|| predicted(shared, request, now), |(_, predicted)| predicted);
        last = Some((request, predicted));
        let prompt_tokens = u32::try_from(request.prompt_ids.len()).unwrap_or(u32::MAX);
        Ask {
            tenant: Arc::clone(request.tenant.name()),
            weight: request.tenant.terms().weight,
            priority: request.priority,
            // What is cached when its turn comes is not known here.
            demand: shared.membership.demand(prompt_tokens, request.max_tokens),
            deadline: deadline(&limits, request),
            predicted,
        }
    });
    asks.collect()
}

/// The nodes' part of the way to the first token, where somebody has said how long it may be.
fn predicted(shared: &Shared, request: &GenerationRequest, now: Instant) -> Option<Predicted> {
    if request.deadline.is_none() && !shared.admission.has_objective() {
        return None;
    }
    let membership = &shared.membership;
    let demand = membership.demand_of(&request.prompt_ids, request.max_tokens, shared.cache_salt(request));
    membership.predict(&demand, now)
}

fn no_pair(shared: &Shared, now: Instant) -> Error {
    // The cheapest request: its refusal is about the nodes alone.
    let membership = &shared.membership;
    match membership.route(&membership.demand(1, 1), &Wish::default(), now) {
        Err(why) => refusal(&why),
        Ok(_) => Error::new(ErrorKind::Unavailable, "no nodes were available; some have just come: try again"),
    }
}
