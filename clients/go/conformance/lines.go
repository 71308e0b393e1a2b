package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"google.golang.org/grpc/codes"

	kvgrpc "kvgrpc.dev/go"
	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

func headLine(engine *kvgrpcv1.Engine) string {
	readiness := "waiting"
	if engine.GetReady() {
		readiness = "ready"
	}
	return fmt.Sprintf("%s %d/%d %s", engine.GetName(), engine.GetRegisteredRanks(), engine.GetExpectedRanks(), readiness)
}

func engineLine(engine *kvgrpcv1.Engine) string {
	rows := joined(engine.GetRows(), ",", func(row *kvgrpcv1.RankRow) string {
		return fmt.Sprintf("%s@%d", at(row.GetRank().GetRank()), row.GetRank().GetEpoch())
	})
	role := strings.TrimPrefix(engine.GetRole().String(), "ROLE_")
	head := strings.TrimPrefix(headLine(engine), engine.GetName())
	return fmt.Sprintf("%s %s%s rows=%s missing=%s", engine.GetName(), role, head, rows, joined(engine.GetMissingRanks(), ",", at))
}

func at(rank *kvgrpcv1.RankId) string {
	return fmt.Sprintf("%d.%d.%d.%d", rank.GetDp(), rank.GetPp(), rank.GetCp(), rank.GetTp())
}

func scoreLine(score *kvgrpcv1.CacheScore) string {
	return fmt.Sprintf("%s/%d device=%d host=%d disk=%d blocks=%d page=%d",
		score.Engine, score.Dp, score.DeviceBlocks, score.HostBlocks, score.DiskBlocks, score.Blocks, score.PageTokens)
}

func placementLine(placement *kvgrpcv1.Placement) string {
	pull := "-"
	if placement.Pull != nil {
		pull = placement.Pull.Engine
	}
	return fmt.Sprintf("%s/%d device=%d host=%d blocks=%d page=%d compute=%d pull=%s",
		placement.Engine, placement.Dp, placement.DeviceBlocks, placement.HostBlocks, placement.Blocks,
		placement.PageTokens, placement.ComputeTokens, pull)
}

func operationLine(operation *kvgrpcv1.CacheOperation) string {
	stop := "-"
	if operation.GetStop() != kvgrpcv1.OperationStop_OPERATION_STOP_UNSPECIFIED {
		stop = strings.TrimPrefix(operation.GetStop().String(), "OPERATION_STOP_")
	}
	return fmt.Sprintf("%s stop=%s asked=%d covered=%d completed=%d quiescent=%t",
		strings.TrimPrefix(operation.GetState().String(), "OPERATION_STATE_"), stop,
		operation.GetAskedPages(), operation.GetCoveredPages(), operation.GetCompletedPages(), operation.GetQuiescent())
}

func refusal(failure kvgrpc.Failure) string {
	retry := "-"
	if failure.MayRepeat() && failure.RetryAfter > 0 {
		retry = strconv.FormatInt(failure.RetryAfter.Milliseconds(), 10)
	}
	line := fmt.Sprintf("refused %s %s retry=%s repeat=%t", upper(failure.Code),
		strings.TrimPrefix(failure.Reason.String(), "ERROR_REASON_"), retry, failure.MayRepeat())
	keys := make([]string, 0, len(failure.Metadata))
	for key := range failure.Metadata {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	for _, key := range keys {
		line += fmt.Sprintf(" %s=%s", key, failure.Metadata[key])
	}
	return line
}

// upper spells a code as the protocol does: NotFound is NOT_FOUND.
func upper(code codes.Code) string {
	var spelled strings.Builder
	for position, letter := range code.String() {
		if position > 0 && unicode.IsUpper(letter) {
			spelled.WriteByte('_')
		}
		spelled.WriteRune(unicode.ToUpper(letter))
	}
	return strings.Replace(spelled.String(), "CANCELED", "CANCELLED", 1)
}

func rowOf(told row) *kvgrpcv1.RankRow {
	return &kvgrpcv1.RankRow{
		Rank: &kvgrpcv1.RankRef{
			Rank: &kvgrpcv1.RankId{Engine: told.Engine, Dp: told.DP}, Epoch: number(told.Epoch),
		},
		Role:      roleOf(told.Role),
		Endpoints: &kvgrpcv1.Endpoints{Grpc: told.GRPC},
		Layout:    &kvgrpcv1.Layout{Dp: max(told.DPSize, 1), Pp: 1, Cp: 1, Tp: 1},
		DataPlane: "shm",
		Model:     &kvgrpcv1.ModelIdentity{Name: told.Model},
	}
}

func roleOf(name string) kvgrpcv1.Role { return kvgrpcv1.Role(kvgrpcv1.Role_value["ROLE_"+name]) }

func promptOf(asked command) *kvgrpcv1.ScorePrompt {
	hashes := &kvgrpcv1.BlockHashes{}
	for _, hash := range asked.Hashes {
		hashes.Values = append(hashes.Values, number(hash))
	}
	return &kvgrpcv1.ScorePrompt{Prefix: &kvgrpcv1.ScorePrompt_BlockHashes{BlockHashes: hashes}, Model: asked.Model}
}

func pagesOf(asked command) *kvgrpcv1.PromptPages {
	pages := &kvgrpcv1.PromptPages{}
	for token := range asked.Tokens {
		pages.Tokens = append(pages.Tokens, asked.FirstToken+token)
	}
	return pages
}

func joined[Each any](all []Each, between string, spell func(Each) string) string {
	if len(all) == 0 {
		return "-"
	}
	spelled := make([]string, len(all))
	for position, each := range all {
		spelled[position] = spell(each)
	}
	return strings.Join(spelled, between)
}

func split(addresses string) []string { return strings.Split(addresses, ",") }

func number(text string) uint64 {
	value, _ := strconv.ParseUint(text, 10, 64)
	return value
}
