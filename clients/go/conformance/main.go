// Conformance is the Go driver of tests/conformance/scenarios: a command of JSON on each line of its input, one line of answer each.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	kvgrpc "kvgrpc.dev/go"
	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

const (
	longestLine = 1 << 20
	usualWithin = 20 * time.Second
	look        = 10 * time.Millisecond
)

type row struct {
	Engine, Role, Epoch, GRPC, Model string
	DP                               uint32
	DPSize                           uint32 `json:"dp_size"`
}

// command is every field that any command may have.
type command struct {
	Op, As, Address, CA, Secret string
	Engine, Role, State         string
	Hash, Medium, Next, Model   string
	Rows                        []row
	Ranks                       uint32
	Hashes, Engines             []string
	Tokens                      uint64
	WaitReady                   bool   `json:"wait_ready"`
	WithinMS                    int    `json:"within_ms"`
	TimeoutMS                   int    `json:"timeout_ms"`
	MaxScores                   uint32 `json:"max_scores"`
	MaxPlacements               uint32 `json:"max_placements"`
	FirstToken                  uint64 `json:"first_token"`
	RequestID                   string `json:"request_id"`
}

type driver struct {
	connections   map[string]*kvgrpc.Connection
	registrations map[string]*kvgrpc.Registration
	watches       map[string]*watched
	followers     map[string]*followed
	operations    map[string]operation
}

type operation struct{ address, id string }

func main() {
	driver := &driver{
		map[string]*kvgrpc.Connection{}, map[string]*kvgrpc.Registration{}, map[string]*watched{}, map[string]*followed{},
		map[string]operation{},
	}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, longestLine)
	for lines.Scan() {
		var asked command
		if err := json.Unmarshal(lines.Bytes(), &asked); err != nil {
			fmt.Println(err)
			continue
		}
		fmt.Println(driver.answer(asked))
	}
}

func (driver *driver) answer(asked command) string {
	within := usualWithin
	if asked.WithinMS > 0 {
		within = time.Duration(asked.WithinMS) * time.Millisecond
	}
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	act := map[string]func(context.Context, command) (string, error){
		"register": driver.register, "state": driver.state, "get_engine": driver.getEngine, "refuse": driver.refuse,
		"resolve_ranks": driver.resolveRanks, "list_engines": driver.listEngines, "watch_engines": driver.watchEngines,
		"until_engine": driver.untilEngine, "follow": driver.follow, "until_current": driver.untilCurrent,
		"until_failed": driver.untilFailed, "counts": driver.counts, "holds": driver.holds, "close": driver.close,
		"score": driver.score, "plan": driver.plan, "lookup": driver.lookup, "start_prefetch": driver.startPrefetch,
		"until_ended": driver.untilEnded, "terminate_prefetch": driver.terminatePrefetch,
	}[asked.Op]
	if act == nil {
		return "no such command: " + asked.Op
	}
	line, err := act(ctx, asked)
	if err == nil {
		return line
	}
	if failure, isStatus := kvgrpc.FailureOf(err); isStatus {
		return refusal(failure)
	}
	if ctx.Err() != nil {
		return "timeout"
	}
	return "failed: " + err.Error()
}

// The registry.

func (driver *driver) register(ctx context.Context, asked command) (string, error) {
	registry, err := driver.registry(asked)
	if err != nil {
		return "", err
	}
	var rows []*kvgrpcv1.RankRow
	for _, each := range asked.Rows {
		rows = append(rows, rowOf(each))
	}
	registration, err := registry.Register(ctx, rows...)
	if err != nil {
		return "", err
	}
	driver.registrations[asked.As] = registration
	return "registered", nil
}

func (driver *driver) state(ctx context.Context, asked command) (string, error) {
	registration := driver.registrations[asked.As]
	err := until(ctx, func() bool { return string(registration.State()) == asked.State })
	if err != nil || registration.State() != kvgrpc.Superseded {
		return asked.State, err
	}
	return fmt.Sprintf("superseded epoch=%d", (<-registration.Superseded()).Epoch), nil
}

func (driver *driver) getEngine(ctx context.Context, asked command) (string, error) {
	registry, err := driver.registry(asked)
	if err != nil {
		return "", err
	}
	engine, err := registry.GetEngine(ctx, asked.Engine)
	return engineLine(engine), err
}

// refuse makes the call once.
func (driver *driver) refuse(ctx context.Context, asked command) (string, error) {
	connection, err := driver.dial(asked, asked.Address)
	if err != nil {
		return "", err
	}
	client := kvgrpcv1.NewRegistryServiceClient(connection)
	answer, err := client.GetEngine(ctx, &kvgrpcv1.GetEngineRequest{Engine: asked.Engine})
	return engineLine(answer.GetEngine()), err
}

func (driver *driver) resolveRanks(ctx context.Context, asked command) (string, error) {
	registry, err := driver.registry(asked)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(asked.TimeoutMS)*time.Millisecond)
	defer cancel()
	engine, err := registry.ResolveRanks(ctx, &kvgrpcv1.ResolveRanksRequest{
		Engine: asked.Engine, Role: roleOf(asked.Role), WaitReady: asked.WaitReady,
		Selectors: []*kvgrpcv1.RankSelector{{}},
	})
	return engineLine(engine), err
}

func (driver *driver) listEngines(ctx context.Context, asked command) (string, error) {
	registry, err := driver.registry(asked)
	if err != nil {
		return "", err
	}
	found, err := registry.ListEngines(ctx, kvgrpcv1.Role_ROLE_UNSPECIFIED, false)
	return joined(found.Engines, ", ", headLine), err
}

// The index, and the hierarchical cache.

func (driver *driver) score(ctx context.Context, asked command) (string, error) {
	connection, err := driver.dial(asked, asked.Address)
	if err != nil {
		return "", err
	}
	scores, err := kvgrpc.NewIndex(connection).Score(ctx, &kvgrpcv1.ScoreRequest{
		Prompts: []*kvgrpcv1.ScorePrompt{promptOf(asked)}, Engines: asked.Engines, MaxScores: asked.MaxScores,
	})
	if err != nil {
		return "", err
	}
	return joined(scores.Prompts[0].Scores, ", ", scoreLine), nil
}

func (driver *driver) plan(ctx context.Context, asked command) (string, error) {
	connection, err := driver.dial(asked, asked.Address)
	if err != nil {
		return "", err
	}
	prompt := &kvgrpcv1.PlanPrompt{Prompt: promptOf(asked), Engines: asked.Engines}
	planned, err := kvgrpc.NewIndex(connection).Plan(ctx, &kvgrpcv1.PlanRequest{
		Prompts: []*kvgrpcv1.PlanPrompt{prompt}, MaxPlacements: asked.MaxPlacements,
	})
	if err != nil {
		return "", err
	}
	return joined(planned.Plans[0].Placements, ", ", placementLine), nil
}

func (driver *driver) lookup(ctx context.Context, asked command) (string, error) {
	connection, err := driver.dial(asked, asked.Address)
	if err != nil {
		return "", err
	}
	found, err := kvgrpc.NewPrefetch(connection).Lookup(ctx, &kvgrpcv1.LookupRequest{Pages: pagesOf(asked)})
	return fmt.Sprintf("asked=%d device=%d host=%d storage=%d page=%d",
		found.GetAskedPages(), found.GetDevicePages(), found.GetHostPages(), found.GetStoragePages(), found.GetPageTokens()), err
}

func (driver *driver) startPrefetch(ctx context.Context, asked command) (string, error) {
	connection, err := driver.dial(asked, asked.Address)
	if err != nil {
		return "", err
	}
	request := &kvgrpcv1.StartPrefetchRequest{Pages: pagesOf(asked), RequestId: asked.RequestID}
	started, err := kvgrpc.NewPrefetch(connection).StartPrefetch(ctx, request)
	driver.operations[asked.As] = operation{asked.Address, started.GetOperationId()}
	return "started", err
}

func (driver *driver) untilEnded(ctx context.Context, asked command) (string, error) {
	began := driver.operations[asked.As]
	ended, err := kvgrpc.NewPrefetch(driver.connections[began.address]).UntilEnded(ctx, began.id)
	return operationLine(ended), err
}

func (driver *driver) terminatePrefetch(ctx context.Context, asked command) (string, error) {
	began := driver.operations[asked.As]
	ended, err := kvgrpc.NewPrefetch(driver.connections[began.address]).TerminatePrefetch(ctx, began.id)
	return operationLine(ended), err
}

// Connections.

func (driver *driver) registry(asked command) (*kvgrpc.Registry, error) {
	var replicas []grpc.ClientConnInterface
	for _, address := range split(asked.Address) {
		connection, err := driver.dial(asked, address)
		if err != nil {
			return nil, err
		}
		replicas = append(replicas, connection)
	}
	return kvgrpc.NewRegistry(replicas[0], replicas[1:]...), nil
}

func (driver *driver) dial(asked command, address string) (*kvgrpc.Connection, error) {
	if known := driver.connections[address]; known != nil {
		return known, nil
	}
	transport := insecure.NewCredentials()
	if asked.CA != "" {
		pem, err := os.ReadFile(asked.CA)
		if err != nil {
			return nil, err
		}
		authorities := x509.NewCertPool()
		authorities.AppendCertsFromPEM(pem)
		transport = credentials.NewTLS(&tls.Config{RootCAs: authorities})
	}
	options := []grpc.DialOption{grpc.WithTransportCredentials(transport)}
	if asked.Secret != "" {
		proof, err := kvgrpc.Proof(asked.Secret, address, asked.CA == "")
		if err != nil {
			return nil, err
		}
		options = append(options, grpc.WithPerRPCCredentials(proof))
	}
	connection, err := kvgrpc.Dial(address, options...)
	if err == nil {
		driver.connections[address] = connection
	}
	return connection, err
}

func until(ctx context.Context, condition func() bool) error {
	for !condition() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(look):
		}
	}
	return nil
}
