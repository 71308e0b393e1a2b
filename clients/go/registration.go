package kvgrpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

const (
	registerWithin, deregisterWithin  = 5 * time.Second, time.Second
	mostRegisterRows, mostRegisterMiB = 1024, 1 << 20
	// Whatever a registry says: it is asked each third of it.
	shortestTTL, usualTTL, longestTTL = 300 * time.Millisecond, 10 * time.Second, 10 * time.Minute
	longestRegisterPause              = 5 * time.Second
)

// RegistrationState is what a Registration is at.
type RegistrationState string

const (
	// Registered: its leases are renewed.
	Registered RegistrationState = "registered"
	// Retrying: the registry is away, or refused; it comes back by itself.
	Retrying RegistrationState = "retrying"
	// Superseded: a newer incarnation has taken over every row. Its ranks were replaced and must stop.
	Superseded RegistrationState = "superseded"
	// Closed: Close was called.
	Closed RegistrationState = "closed"
)

// Supersession says that a newer incarnation of a rank took its row over: that rank was replaced and must stop.
type Supersession struct {
	Rank *kvgrpcv1.RankId
	// Epoch is the newer one's.
	Epoch uint64
}

// Registration keeps rows registered, for as long as it lives and whatever the registry does: it renews the leases at a third of
// their time, and registers again when the registry does not know a lease, was restarted, or did not answer. Any goroutine may use
// it.
type Registration struct {
	replicas   []kvgrpcv1.RegistryServiceClient
	cancel     context.CancelFunc
	done       chan struct{}
	superseded chan Supersession

	mutex sync.Mutex
	rows  []*kvgrpcv1.RankRow
	state RegistrationState
	err   error

	// Of the goroutine that looks after it.
	leases map[uint64]*kvgrpcv1.RankRow
	ttl    time.Duration
}

// Register registers rows, again while the registry is away or asks for time, up to the deadline of ctx; then it looks after them
// until Close. Where the error says STALE_EPOCH, an epoch above its metadata's currentEpoch would be taken. The rows must not be
// changed any more.
func (registry *Registry) Register(ctx context.Context, rows ...*kvgrpcv1.RankRow) (*Registration, error) {
	looking, cancel := context.WithCancel(context.Background())
	registration := &Registration{
		replicas:   slices.Clone(registry.replicas),
		cancel:     cancel,
		done:       make(chan struct{}),
		superseded: make(chan Supersession, len(rows)),
		rows:       rows,
		state:      Registered,
		leases:     map[uint64]*kvgrpcv1.RankRow{},
		ttl:        usualTTL,
	}
	first := func(ctx context.Context, rows []*kvgrpcv1.RankRow, _ ...grpc.CallOption) (struct{}, error) {
		err := registration.register(ctx, rows)
		if err != nil {
			registration.hangUp()
		}
		return struct{}{}, err
	}
	if _, err := ask(ctx, first, rows); err != nil {
		close(registration.done)
		_ = registration.Close()
		return nil, err
	}
	go registration.lookAfter(looking)
	return registration, nil
}

// State is what it is at.
func (registration *Registration) State() RegistrationState {
	registration.mutex.Lock()
	defer registration.mutex.Unlock()
	return registration.state
}

// Err is why it last failed; nil: it never did.
func (registration *Registration) Err() error {
	registration.mutex.Lock()
	defer registration.mutex.Unlock()
	return registration.err
}

// Superseded tells each rank whose row was taken over. Whoever does not read it holds nothing up.
func (registration *Registration) Superseded() <-chan Supersession { return registration.superseded }

// Close stops, and deregisters within a second if the registry answers; otherwise the leases run out. The error is that of the
// registry.
func (registration *Registration) Close() error {
	registration.cancel()
	<-registration.done
	registration.mutex.Lock()
	rows := registration.rows
	registration.rows, registration.state = nil, Closed
	registration.mutex.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), deregisterWithin)
	defer cancel()
	for chunk := range slices.Chunk(rows, mostRegisterRows) {
		request := &kvgrpcv1.DeregisterRequest{}
		for _, row := range chunk {
			request.Ranks = append(request.Ranks, row.Rank)
		}
		if _, err := registration.replicas[0].Deregister(ctx, request); err != nil {
			return err
		}
	}
	return nil
}

func (registration *Registration) lookAfter(ctx context.Context) {
	defer close(registration.done)
	attempt := 0
	for ctx.Err() == nil && len(registration.rows) > 0 {
		err := registration.hold(ctx, &attempt)
		if ctx.Err() != nil {
			return
		}
		failure, _ := FailureOf(err)
		if failure.Reason == kvgrpcv1.ErrorReason_ERROR_REASON_STALE_EPOCH {
			registration.supersede(failure, err)
			continue
		}
		registration.note(Retrying, err)
		sleep(ctx, registration.pause(attempt, failure.RetryAfter))
		registration.hangUp()
		attempt++
	}
}

// hold registers where that is needed, then renews until something fails. The error is never nil.
func (registration *Registration) hold(ctx context.Context, attempt *int) error {
	if registration.State() != Registered {
		if err := registration.register(ctx, registration.rows); err != nil {
			return err
		}
		registration.note(Registered, registration.Err())
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stream, err := registration.replicas[0].KeepAlive(ctx)
	if err != nil {
		return err
	}
	answers := make(chan kept)
	go receive(ctx, stream, answers)
	for {
		unknown, err := registration.renew(ctx, cancel, stream, answers)
		if err != nil {
			return err
		}
		// Not before: where every renewal is refused, ranks that register anew at once would be a storm.
		*attempt = 0
		if len(unknown) > 0 {
			if err := registration.register(ctx, unknown); err != nil {
				return err
			}
		}
		select {
		case <-time.After(registration.ttl / 3):
		case early := <-answers:
			return orEnded(early.err)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// kept is an answer of KeepAlive, or why there is none.
type kept struct {
	response *kvgrpcv1.KeepAliveResponse
	err      error
}

// receive closes answers at its end, which is that of the call.
func receive(ctx context.Context, stream kvgrpcv1.RegistryService_KeepAliveClient, answers chan<- kept) {
	defer close(answers)
	for {
		response, err := stream.Recv()
		select {
		case answers <- kept{response, err}:
		case <-ctx.Done():
			return
		}
		if err != nil {
			return
		}
	}
}

// renew makes one request: the rows whose leases the registry does not know.
func (registration *Registration) renew(
	ctx context.Context, cancel context.CancelCauseFunc, stream kvgrpcv1.RegistryService_KeepAliveClient, answers <-chan kept,
) ([]*kvgrpcv1.RankRow, error) {
	request := &kvgrpcv1.KeepAliveRequest{}
	for lease := range registration.leases {
		request.LeaseIds = append(request.LeaseIds, lease)
	}
	if err := stream.Send(request); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	select {
	case answer := <-answers:
		if answer.err != nil || answer.response == nil {
			return nil, orEnded(answer.err)
		}
		registration.ttl = ttlOf(answer.response.GetTtl().AsDuration())
		var unknown []*kvgrpcv1.RankRow
		for _, lease := range answer.response.UnknownLeaseIds {
			if row := registration.leases[lease]; row != nil {
				unknown = append(unknown, row)
				delete(registration.leases, lease)
			}
		}
		return unknown, nil
	case <-time.After(max(registration.ttl/3, time.Second)):
		// The connection is left with it: whoever holds it is frozen, or gone.
		cancel(errSilent)
		for range answers {
		}
		return nil, silent(ctx, errSilent)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (registration *Registration) register(ctx context.Context, rows []*kvgrpcv1.RankRow) error {
	for len(rows) > 0 {
		chunk := rows[:fitting(rows)]
		calling, cancel := context.WithTimeout(ctx, registerWithin)
		response, err := registration.replicas[0].Register(calling, &kvgrpcv1.RegisterRequest{Rows: chunk})
		cancel()
		if err != nil {
			return err
		}
		if len(response.Leases) != len(chunk) {
			return errors.New("the registry gave another number of leases than of rows")
		}
		registration.ttl = ttlOf(response.GetTtl().AsDuration())
		registration.dropLeases(chunk)
		for at, lease := range response.Leases {
			registration.leases[lease.LeaseId] = chunk[at]
		}
		rows = rows[len(chunk):]
	}
	return nil
}

// fitting counts the first rows that one request may have; at least one.
func fitting(rows []*kvgrpcv1.RankRow) int {
	size := 0
	for at, row := range rows {
		size += proto.Size(row)
		if at > 0 && (at == mostRegisterRows || size > mostRegisterMiB) {
			return at
		}
	}
	return len(rows)
}

func (registration *Registration) supersede(failure Failure, err error) {
	epoch, _ := strconv.ParseUint(failure.Metadata["currentEpoch"], 10, 64)
	gone := func(row *kvgrpcv1.RankRow) bool { return rankName(row.GetRank().GetRank()) == failure.Metadata["rank"] }
	registration.mutex.Lock()
	defer registration.mutex.Unlock()
	lost := slices.DeleteFunc(slices.Clone(registration.rows), func(row *kvgrpcv1.RankRow) bool { return !gone(row) })
	if len(lost) == 0 {
		lost = registration.rows
	}
	registration.rows = slices.DeleteFunc(slices.Clone(registration.rows), func(row *kvgrpcv1.RankRow) bool {
		return slices.Contains(lost, row)
	})
	registration.dropLeases(lost)
	registration.state, registration.err = Retrying, err
	if len(registration.rows) == 0 {
		registration.state = Superseded
	}
	for _, row := range lost {
		registration.superseded <- Supersession{row.GetRank().GetRank(), epoch}
	}
}

func (registration *Registration) dropLeases(rows []*kvgrpcv1.RankRow) {
	for lease, row := range registration.leases {
		if slices.Contains(rows, row) {
			delete(registration.leases, lease)
		}
	}
}

func (registration *Registration) note(state RegistrationState, err error) {
	registration.mutex.Lock()
	defer registration.mutex.Unlock()
	registration.state, registration.err = state, err
}

// pause is wide, because all ranks of a cluster lose their registry at the same moment.
func (registration *Registration) pause(attempt int, asked time.Duration) time.Duration {
	first, longest := min(time.Second, registration.ttl/10), min(registration.ttl/3, longestRegisterPause)
	pause := min(first<<min(attempt, 16), longest)
	return min(asked, longestTTL) + pause/10 + rand.N(pause*9/10+1)
}

// hangUp goes on at the next replica.
func (registration *Registration) hangUp() {
	registration.replicas = append(registration.replicas[1:], registration.replicas[0])
}

// rankName is how a registry's refusals call a rank.
func rankName(rank *kvgrpcv1.RankId) string {
	return fmt.Sprintf("%s/dp%d/pp%d/cp%d/tp%d", rank.GetEngine(), rank.GetDp(), rank.GetPp(), rank.GetCp(), rank.GetTp())
}

func ttlOf(told time.Duration) time.Duration {
	if told <= 0 {
		return usualTTL
	}
	return min(max(told, shortestTTL), longestTTL)
}

func orEnded(err error) error {
	if err == nil || endedWell(err) {
		return errEnded
	}
	return err
}
