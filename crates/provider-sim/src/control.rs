//! The control's gRPC service: what a test orders and asks.

use std::sync::{Arc, MutexGuard, PoisonError};

use semel_proto::provider::v1::simulator_control_server::SimulatorControl;
use semel_proto::provider::v1::{
    CountCallsRequest, CountCallsResponse, LiftFaultsRequest, LiftFaultsResponse, ListHappeningsRequest,
    ListHappeningsResponse, MoveClockRequest, MoveClockResponse, OrderFaultRequest, OrderFaultResponse,
    ReleaseRequest, ReleaseResponse, SetHorizonRequest, SetHorizonResponse,
};
use time::Duration;
use tonic::{Request, Response, Status};

use crate::counter::Counter;
use crate::faults::{self, Plan};
use crate::service::read_page_size;
use crate::{clock, holds};

const USUAL_PAGE: usize = 100;
const LONGEST_HOLD: usize = 64;

/// The service over a counter.
#[derive(Clone, Debug)]
pub(crate) struct Control(pub(crate) Arc<Counter>);

impl Control {
    fn plan(&self) -> MutexGuard<'_, Plan> {
        self.0.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[tonic::async_trait]
impl SimulatorControl for Control {
    async fn order_fault(
        &self,
        request: Request<OrderFaultRequest>,
    ) -> Result<Response<OrderFaultResponse>, Status> {
        let rule = faults::read(request.into_inner()).map_err(Status::invalid_argument)?;
        if let Some(hold) = rule.fault.hold() {
            self.0.holds.close(hold).map_err(too_many_holds)?;
        }
        let fault = self.plan().add(rule);
        let fault = fault.map_err(|_| Status::resource_exhausted("too many faults are ordered"))?;
        Ok(Response::new(OrderFaultResponse { fault }))
    }

    async fn lift_faults(
        &self,
        request: Request<LiftFaultsRequest>,
    ) -> Result<Response<LiftFaultsResponse>, Status> {
        let fault = request.into_inner().fault;
        self.plan().lift((fault > 0).then_some(fault));
        Ok(Response::new(LiftFaultsResponse {}))
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> Result<Response<ReleaseResponse>, Status> {
        let hold = request.into_inner().hold;
        if hold.is_empty() || hold.len() > LONGEST_HOLD {
            return Err(Status::invalid_argument("hold must be 1 to 64 bytes"));
        }
        let waiting = self.0.holds.release(&hold).map_err(too_many_holds)?;
        Ok(Response::new(ReleaseResponse { waiting }))
    }

    async fn list_happenings(
        &self,
        request: Request<ListHappeningsRequest>,
    ) -> Result<Response<ListHappeningsResponse>, Status> {
        let ListHappeningsRequest { after, key, page_size } = request.into_inner();
        let most = read_page_size(page_size)?.unwrap_or(USUAL_PAGE);
        Ok(Response::new(self.0.history.list(after, &key, most)))
    }

    async fn count_calls(
        &self,
        _: Request<CountCallsRequest>,
    ) -> Result<Response<CountCallsResponse>, Status> {
        Ok(Response::new(self.0.history.calls()))
    }

    async fn move_clock(
        &self,
        request: Request<MoveClockRequest>,
    ) -> Result<Response<MoveClockResponse>, Status> {
        let by = read_duration(request.into_inner().by.as_ref())?;
        let moved = self.0.clock.move_by(by);
        moved.map_err(|_| Status::invalid_argument("the clock can be moved by 10 years at most"))?;
        Ok(Response::new(MoveClockResponse { now: Some(clock::timestamp(self.0.clock.now())) }))
    }

    async fn set_horizon(
        &self,
        request: Request<SetHorizonRequest>,
    ) -> Result<Response<SetHorizonResponse>, Status> {
        let horizon = read_duration(request.into_inner().horizon.as_ref())?;
        if horizon.is_negative() {
            return Err(Status::invalid_argument("horizon is negative"));
        }
        let horizon = (!horizon.is_zero()).then_some(horizon);
        let set = self.0.clerk.ask(move |desk, _| desk.set_horizon(horizon)).await;
        set.map_err(|_| Status::unavailable("the horizon was not set"))?;
        Ok(Response::new(SetHorizonResponse {}))
    }
}

fn too_many_holds(_: holds::TooMany) -> Status {
    Status::resource_exhausted("too many holds are closed")
}

fn read_duration(duration: Option<&prost_types::Duration>) -> Result<Duration, Status> {
    let duration = duration.map_or(Some(Duration::ZERO), clock::duration);
    duration.ok_or_else(|| Status::invalid_argument("a duration is none"))
}
