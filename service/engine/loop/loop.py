"""Owns the device: takes messages, schedules, launches, completes.

One thread does all of it, in turns:

    mailbox.take → residents, scheduler → answer what the device has finished → backend.begin → mailbox.flush

so nothing takes a lock, and no request waits for another thread to wake. With one thread for the sockets and one that
waited for the device, a lone request paid five wakes. While the device works, the thread polls it and the sockets in
turn. Where a thread of the backend computes instead, it rings the mailbox at its end, and short batches pass a long one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from tilewire.service.engine.backends.contract import Backend, CannotStart, DeviceLost, LaunchFailed
from tilewire.service.engine.loop.arenas import Arenas
from tilewire.service.engine.loop.batching import join
from tilewire.service.engine.loop.ipc import Mailbox
from tilewire.service.engine.loop.jobs import (
    Attached,
    BoundJob,
    Call,
    Changed,
    Client,
    Event,
    Launched,
    Lost,
    Received,
    Stop,
    ids_of,
)
from tilewire.service.engine.loop.resolve import Bindings, bind, plan_of, stage_in, stage_out
from tilewire.service.engine.loop.scheduler import Caps, Scheduler
from tilewire.service.engine.loop.warmup import Interrupted, Prepare, WarmupClients
from tilewire.service.engine.metrics import EngineMetrics
from tilewire.service.engine.tensors.commands import TensorStore
from tilewire.service.engine.tensors.host_mappings import Mappings
from tilewire.service.errors import ClientGone, DeadlinePassed, InternalError, TilewireError
from tilewire.service.ipc.messages import (
    Cancel,
    Done,
    Failed,
    ForgetTemplate,
    Hello,
    Job,
    Stale,
    Started,
    Template,
    Timings,
    ToEngine,
    Welcome,
)
from tilewire.service.supervisor import child

logger = logging.getLogger(__name__)

# While one batch computes, the next is staged in. A third would leave fewer requests for each, as would one beside a short one.
MAX_LAUNCHED = 2
WORTH_OVERLAP_S = 200e-6

# How long figures may wait in this process before `/metrics` can show them.
FLUSH_S = 0.05

# A small batch is over within this, its launch included, and the thread polls the device without a pause. A longer one is
# polled now and then, and each time the timer adds its own slack.
SPIN_NS = 1_000_000
POLL_AGAIN_S = 20e-6

# A device without a job for this long is tuned, in turns of some 0.1 ms. Clients that ask in a loop come again sooner.
IDLE_NS = 100_000_000

# `sysexits.h` calls it EX_SOFTWARE; the supervisor starts a new engine whatever the status.
EXIT_DEVICE_LOST = 70


class EngineLoop:
    """Runs jobs of all gateways on one device.

    An idle thread polls for work for `poll_ns` before it sleeps. Deadlines are on `clock_ns`, the monotonic clock.
    """

    def __init__(
        self,
        index: int,
        mailbox: Mailbox,
        backend: Backend,
        store: TensorStore,
        mappings: Mappings,
        metrics: EngineMetrics,
        caps: Caps | None = None,
        *,
        poll_ns: int = 0,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._index = index
        self._mailbox = mailbox
        self._backend = backend
        self._store = store
        self._regions = store.regions
        self._bindings = Bindings(store.residents)
        self._mappings = mappings
        self._arenas = Arenas(backend, mappings, self._welcome)
        store.on_moved = self._detach_if_done
        self._metrics = metrics
        self._clock_ns = clock_ns
        self._poll_ns = poll_ns
        self._spin_ns = max(SPIN_NS, poll_ns)
        self._poll_until_ns = 0
        self._scheduler: Scheduler[BoundJob] = Scheduler(caps)
        self._wake_ns = 0
        self._flush_s = 0.0
        self._is_unflushed = True
        self._queue_bytes = 0
        # When the last job came or ended, whether tuning may find something to do since, and since when it has had the device.
        self._busy_ns = 0
        self._may_tune = False
        self._is_tunable = True
        self._tuning_ns = 0
        self._launched: deque[Launched] = deque()
        self._is_stopping = False
        self._prepare: Prepare | None = None
        self._on_ready: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._guard, name="loop")

    # ── any thread ────────────────────────────────────────────────────────────────────────────────

    def start(self, prepare: Prepare | None = None, on_ready: Callable[[], object] | None = None) -> None:
        """Starts the thread. Gateways wait for what it prepares, and receive its progress; then it calls `on_ready`."""
        self._prepare, self._on_ready = prepare, on_ready
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop after everything that came before is answered; blocks until it has."""
        self._mailbox.post(Stop())
        self._thread.join()

    @property
    def launched_ns(self) -> int:
        """Begin of the oldest batch on the device, or of a turn of tuning, on the loop's clock; 0 for none.

        A batch that a thread of this process computes is none: it may take as long as it takes.
        """
        try:
            oldest = self._launched[0]
        except IndexError:
            return self._tuning_ns
        return 0 if oldest.running.rings else oldest.began_ns

    # ── loop thread ───────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            self._warm_up()
        except Interrupted:
            self._mappings.close()
            self._mailbox.close()
            return
        while True:
            for event in self._mailbox.take(self._timeout_s()):
                self._handle(event)
            self._complete()
            if self._has_room and len(self._scheduler):
                self._launch_next()
            self._mailbox.flush()
            self._metrics.observe_queue(len(self._scheduler), self._queue_bytes)
            self._hand_over_metrics()
            if self._may_tune and self._idle_for_ns() >= IDLE_NS:
                self._tune()
            if self._is_stopping and not len(self._scheduler) and not self._launched and not self._store.is_moving:
                self._store.close()
                self._mappings.close()
                self._mailbox.close()
                self._metrics.flush()
                return

    def _warm_up(self) -> None:
        events: list[Event] = []
        if self._prepare is not None:
            clients = WarmupClients(self._mailbox, self._backend.identity.device, self._arenas.map)
            self._prepare(clients.report)
            clients.close()
            events = clients.events
        # Before the first gateway hears that this engine is ready.
        self._store.follow(at_once=True)
        self._mailbox.follow(self._store.follower)
        self._store.start()
        # What the start has posted comes before the first job.
        for event in (*events, *self._mailbox.take(0)):
            self._handle(event)
        self._mailbox.flush()
        self._metrics.start_serving()
        if self._on_ready is not None:
            self._on_ready()

    @property
    def _has_room(self) -> bool:
        launched = self._launched
        if not launched:
            return True
        if len(launched) >= MAX_LAUNCHED:
            return False
        last = launched[-1]
        return self._scheduler.is_long(last.seconds) if last.running.rings else last.seconds >= WORTH_OVERLAP_S

    def _timeout_s(self) -> float | None:
        """Returns how long to wait for an event: for ever when only an event gives work, not at all when work is at hand."""
        for launched in self._launched:
            if not launched.running.rings:
                return 0 if self._clock_ns() - launched.began_ns < self._spin_ns else POLL_AGAIN_S
        if self._launched:
            return FLUSH_S if self._is_unflushed else None
        if len(self._scheduler):
            return max(0, self._wake_ns - self._clock_ns()) / 1e9
        if self._poll_until_ns and self._clock_ns() < self._poll_until_ns:
            return 0
        if self._may_tune:
            return min(FLUSH_S, max(0, IDLE_NS - self._idle_for_ns()) / 1e9)
        return FLUSH_S if self._is_unflushed else None

    def _idle_for_ns(self) -> int:
        """How long there has been no job."""
        return 0 if self._launched or len(self._scheduler) else self._clock_ns() - self._busy_ns

    def _tune(self) -> None:
        """Takes one turn of tuning, between two looks at the gateways. Its errors end it, and nothing else."""
        backend = self._backend
        num_learned, self._tuning_ns = backend.num_learned, self._clock_ns()
        try:
            self._may_tune = backend.tune()
        except DeviceLost:
            raise
        except Exception:
            logger.exception("online tuning is off until the next start")
            self._is_tunable = self._may_tune = False
        self._tuning_ns = 0
        if backend.num_learned > num_learned:
            self._store.describe_kernels()

    def _hand_over_metrics(self) -> None:
        """Lets `/metrics` show what was recorded, now and then; at the latest when there has been nothing to do for a while."""
        now_s = time.monotonic()
        if self._is_unflushed and now_s > self._flush_s:
            self._metrics.flush()
            self._flush_s = now_s + FLUSH_S
            self._is_unflushed = False

    def _handle(self, event: Event) -> None:
        match event:
            case Received(client, messages):
                for message in messages:
                    self._answer_errors(client, message)
            case Attached(client):
                self._arenas.map(client)
            case Lost(client):
                client.is_gone = True
                for waiting in list(client.waiting.values()):
                    self._forget(waiting)
                self._store.detach(client)
                while client.plans:
                    self._bindings.forget(client.plans.popitem()[1])
                self._detach_if_done(client)
            case Changed():
                self._store.follow()
            case Call(call):
                call()
            case Stop():
                self._is_stopping = True

    def _welcome(self, client: Client) -> None:
        """Lets a gateway whose arena is mapped send jobs."""
        if client.is_gone:
            self._arenas.unmap(client)
            return
        identity = self._backend.identity
        client.send(
            Welcome(
                engine=self._index,
                backend=identity.backend,
                device=identity.device,
                device_name=identity.device_name,
                torch=identity.torch,
                triton=identity.triton,
                resident_bytes=self._store.residents.quota_bytes,
                residing=self._store.attach(client),
                has_store=self._store.residents.has_store,
                pid=os.getpid(),
            )
        )
        logger.info("%s attached with %d bytes", client.name, client.segment.nbytes)

    def _detach_if_done(self, client: Client) -> None:
        # One that is still being mapped is unmapped behind that.
        if client.is_gone and client.mapped is not None and not client.num_launched:
            self._arenas.unmap(client)

    def _answer_errors(self, client: Client, message: ToEngine) -> None:
        if client.is_gone:
            return
        try:
            self._handle_message(client, message)
        except DeviceLost:
            raise
        except TilewireError as error:
            client.send(failed(message, error))
        except Exception:
            logger.exception("a message of %s failed", client.name, extra=ids_of(message))
            client.send(failed(message, InternalError("internal error")))

    def _handle_message(self, client: Client, message: ToEngine) -> None:
        match message:
            case Job():
                self._queue(client, message)
            case Template():
                self._plan(client, message)
            case ForgetTemplate(id=id_):
                if (plan := client.plans.pop(id_, None)) is not None:
                    self._bindings.forget(plan)
            case Cancel(id=id_, is_late=is_late):
                client.send(self._cancel(client, id_, is_late=is_late))
            case Hello():
                raise AssertionError("This is a bug: a second hello.")
            case _:
                if (reply := self._store.answer(client, message)) is not None:
                    client.send(reply)

    def _plan(self, client: Client, template: Template) -> None:
        """Keeps the plan of a template's jobs. A template has no answer: without a plan its jobs fail, and no others."""
        try:
            client.plans[template.id] = plan_of(template, self._backend.identity.backend)
        except Exception:
            logger.exception("a template of %s cannot be planned", client.name)

    def _queue(self, client: Client, message: Job) -> None:
        plan = client.plans.get(message.template)
        assert plan is not None, "This is a bug: a job without its template."
        job = bind(message, plan, client, self._bindings, self._regions, self._clock_ns())
        if isinstance(job, Stale):
            client.send(job)
            return
        client.waiting[message.id] = job
        self._queue_bytes += plan.template.moved_bytes
        self._scheduler.add(job)

    def _cancel(self, client: Client, id_: int, *, is_late: bool) -> Failed | Started:
        """Forgets a job that has not started; says which it is."""
        job = client.waiting.get(id_)
        if job is None:
            return Started(id_)
        self._forget(job)
        error = _late(job, self._clock_ns()) if is_late else ClientGone("cancelled before it started")
        return Failed.of(id_, error)

    def _forget(self, job: BoundJob) -> None:
        self._scheduler.discard(job)
        self._unqueue(job)
        self._regions.release(job.uses)

    def _unqueue(self, job: BoundJob) -> None:
        del job.client.waiting[job.job.id]
        self._queue_bytes -= job.plan.template.moved_bytes
        # A job that never runs moves the queue's gauges, too.
        self._is_unflushed = True

    def _launch_next(self) -> None:
        now_ns = self._clock_ns()
        is_idle = not self._launched
        # Beside what a thread computes there is room for short batches alone.
        without_long = not is_idle and self._launched[0].running.rings
        decision = self._scheduler.decide(now_ns, is_idle=is_idle, without_long=without_long)
        for job in decision.expired:
            self._unqueue(job)
            self._fail(job, _late(job, now_ns))
        for job in decision.batch:
            self._unqueue(job)
        if decision.batch:
            self._launch(decision.batch, now_ns)
        self._wake_ns = decision.wake_ns

    def _launch(self, batch: list[BoundJob], now_ns: int) -> None:
        batch = [job for job in batch if not job.uses or self._stage_in(job)]
        if not batch:
            return
        try:
            running = self._backend.begin(join(batch))
        except DeviceLost:
            logger.critical("the device was lost under these requests", extra=ids_of(*(job.job for job in batch)))
            raise
        except Exception as error:  # noqa: BLE001  (logged and answered there)
            self._on_failure(batch, now_ns, error)
            return
        for job in batch:
            job.client.num_launched += 1
        self._launched.append(Launched(batch, running, now_ns, sum(job.seconds for job in batch)))

    def _stage_in(self, job: BoundJob) -> bool:
        """Copies what the device does not reach by itself; whether the job can run."""
        try:
            stage_in(job, self._regions)
        except TilewireError as error:
            self._fail(job, error)
            return False
        return True

    def _on_failure(self, batch: list[BoundJob], now_ns: int, error: Exception) -> None:
        """One job must not fail another: jobs that failed together are tried alone."""
        op = batch[0].plan.op.name
        if len(batch) > 1:
            ids = ids_of(*(job.job for job in batch))
            logger.warning("a batch of %d %s failed, each runs alone: %s", len(batch), op, error, extra=ids)
            for job in batch:
                self._launch([job], now_ns)
            return
        (job,) = batch
        if not isinstance(error, TilewireError):
            logger.error("%s failed", op, exc_info=error, extra=ids_of(job.job))
            error = InternalError("internal error")
        self._fail(job, error)

    def _fail(self, job: BoundJob, error: TilewireError) -> None:
        """Ends a job that never ran."""
        job.client.send(Failed.of(job.job.id, error))
        self._regions.release(job.uses)

    def _complete(self) -> None:
        """Ends the batches that the device has finished."""
        for launched in tuple(self._launched):
            if (outcome := self._outcome(launched)) is None:
                if launched.running.rings:
                    continue
                # The device works on one after the other.
                return
            self._launched.remove(launched)
            if isinstance(outcome, Timings):
                self._answer_batch(launched, outcome)
            else:
                self._on_failure(launched.batch, self._clock_ns(), outcome.error)
                self._leave(launched.batch)

    def _answer_batch(self, launched: Launched, timings: Timings) -> None:
        batch = launched.batch
        op = batch[0].plan.op.name
        waited_ns = [launched.began_ns - job.arrived_ns for job in batch]
        for job, queue_ns in zip(batch, waited_ns, strict=True):
            own = Timings(queue_ns, timings.h2d_ns, timings.kernel_ns, timings.d2h_ns, job.arrived_ns)
            job.client.send(self._answer(job, own, len(batch)))
        # Before the next launch, which takes longer than to say what is done.
        self._mailbox.flush()
        self._let_go(batch)
        self._scheduler.settle(batch, (timings.h2d_ns + timings.kernel_ns + timings.d2h_ns) / 1e9)
        self._metrics.record_queue(op, waited_ns)
        self._metrics.record_stages(op, timings, len(batch))
        self._metrics.record_launch(op, batch[0].plan.program, [job.plan.work for job in batch], timings)
        self._is_unflushed = True
        self._busy_ns = self._clock_ns()
        self._may_tune = self._is_tunable
        if self._poll_ns:
            # A client that was just answered may send again at once.
            self._poll_until_ns = self._clock_ns() + self._poll_ns

    @staticmethod
    def _outcome(launched: Launched) -> Timings | LaunchFailed | None:
        """Returns stage times of a batch once it is done, or why it failed by itself; None before."""
        try:
            return launched.running.wait() if launched.running.is_done() else None
        except LaunchFailed as failure:
            return failure
        except BaseException:
            ids = ids_of(*(job.job for job in launched.batch))
            logger.critical("a launch failed under these requests", extra=ids)
            raise

    def _answer(self, job: BoundJob, timings: Timings, batch_size: int) -> Done | Failed:
        stored = None
        try:
            if job.uses:
                stage_out(job)
            if job.kept is not None:
                stored = self._store.keep(job)
        except TilewireError as error:
            return Failed.of(job.job.id, error)
        return Done(job.job.id, timings, batch_size, stored)

    def _let_go(self, batch: list[BoundJob]) -> None:
        """Releases the regions and the gateways of a batch that is answered."""
        for job in batch:
            if job.uses:
                self._regions.release(job.uses)
        self._leave(batch)

    def _leave(self, batch: list[BoundJob]) -> None:
        """Releases the gateways of a batch that the device has left."""
        for job in batch:
            job.client.num_launched -= 1
        for client in {id(job.client): job.client for job in batch}.values():
            self._detach_if_done(client)

    # ── the thread ────────────────────────────────────────────────────────────────────────────────

    def _guard(self) -> None:
        """Ends the process when the thread fails; the supervisor starts a new one."""
        try:
            self._run()
        except CannotStart as error:
            logger.error("the engine cannot start: %s", error)  # noqa: TRY400  (the reason is the whole story)
            logging.shutdown()
            os._exit(child.EXIT_CANNOT_START)
        except BaseException:
            logger.exception("the engine cannot go on")
            logging.shutdown()
            os._exit(EXIT_DEVICE_LOST)


def _late(job: BoundJob, now_ns: int) -> DeadlinePassed:
    """Returns the error of a job whose deadline has passed."""
    late_ms = max(0, now_ns - job.deadline_ns) / 1e6
    return DeadlinePassed(f"deadline: it passed {late_ms:.1f} ms before the request could start")


def failed(message: ToEngine, error: TilewireError) -> Failed:
    """The answer to a message that failed."""
    assert not isinstance(message, Hello | Template | ForgetTemplate), "This is a bug."
    return Failed.of(message.id, error)
