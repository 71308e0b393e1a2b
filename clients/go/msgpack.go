package kvgrpc

import (
	"encoding/binary"
	"errors"
	"math"
)

const (
	// Batches are four deep; what nests deeper is hostile.
	deepest = 32
	// What is allocated on the word of a header alone.
	most = 256
)

var errMsgpack = errors.New("no msgpack")

// reader reads msgpack as nil, bool, int64, uint64 (above the largest int64), float64, string, []byte, []any and
// map[string]any. What a header promises is never allocated before its bytes are there. Keys that are no text are passed
// over, with their values.
type reader struct {
	rest []byte
}

// decodeMsgpack reads exactly one value.
func decodeMsgpack(payload []byte) (any, error) {
	reader := reader{payload}
	value, err := reader.value(0)
	if err == nil && len(reader.rest) > 0 {
		err = errMsgpack
	}
	return value, err
}

func (reader *reader) value(depth int) (any, error) {
	header, err := reader.take(1)
	if err != nil || depth > deepest {
		return nil, errMsgpack
	}
	code := header[0]
	switch {
	case code <= 0x7f || code >= 0xe0:
		return int64(int8(code)), nil
	case code <= 0x8f:
		return reader.fields(uint64(code&0x0f), depth)
	case code <= 0x9f:
		return reader.list(uint64(code&0x0f), depth)
	case code <= 0xbf:
		return reader.text(uint64(code & 0x1f))
	}
	switch code {
	case 0xc0:
		return nil, nil
	case 0xc2, 0xc3:
		return code == 0xc3, nil
	case 0xc4, 0xc5, 0xc6:
		return reader.sized(1<<(code-0xc4), func(size uint64) (any, error) { return reader.bytes(size) })
	case 0xca, 0xcb:
		return reader.sized(4<<(code-0xca), func(bits uint64) (any, error) { return float(bits, code == 0xca), nil })
	case 0xcc, 0xcd, 0xce, 0xcf:
		return reader.sized(1<<(code-0xcc), func(number uint64) (any, error) { return integer(number), nil })
	case 0xd0, 0xd1, 0xd2, 0xd3:
		width := 1 << (code - 0xd0)
		return reader.sized(width, func(number uint64) (any, error) {
			unused := 64 - 8*width
			return int64(number<<unused) >> unused, nil
		})
	case 0xd9, 0xda, 0xdb:
		return reader.sized(1<<(code-0xd9), reader.text)
	case 0xdc, 0xdd:
		return reader.sized(2<<(code-0xdc), func(count uint64) (any, error) { return reader.list(count, depth) })
	case 0xde, 0xdf:
		return reader.sized(2<<(code-0xde), func(count uint64) (any, error) { return reader.fields(count, depth) })
	}
	return nil, errMsgpack
}

func (reader *reader) take(count uint64) ([]byte, error) {
	if count > uint64(len(reader.rest)) {
		return nil, errMsgpack
	}
	taken := reader.rest[:count]
	reader.rest = reader.rest[count:]
	return taken, nil
}

// sized reads a big-endian number of so many bytes, and what it says of the rest.
func (reader *reader) sized(width int, then func(uint64) (any, error)) (any, error) {
	taken, err := reader.take(uint64(width))
	if err != nil {
		return nil, err
	}
	var number [8]byte
	copy(number[8-width:], taken)
	return then(binary.BigEndian.Uint64(number[:]))
}

func (reader *reader) bytes(size uint64) (any, error) {
	taken, err := reader.take(size)
	return append([]byte{}, taken...), err
}

func (reader *reader) text(size uint64) (any, error) {
	taken, err := reader.take(size)
	return string(taken), err
}

func (reader *reader) list(count uint64, depth int) (any, error) {
	// Each value has at least one byte.
	if count > uint64(len(reader.rest)) {
		return nil, errMsgpack
	}
	values := make([]any, 0, min(count, most))
	for range count {
		value, err := reader.value(depth + 1)
		if err != nil {
			return nil, err
		}
		values = append(values, value)
	}
	return values, nil
}

func (reader *reader) fields(count uint64, depth int) (any, error) {
	if count > uint64(len(reader.rest)) {
		return nil, errMsgpack
	}
	fields := make(map[string]any, min(count, most))
	for range count {
		key, err := reader.value(depth + 1)
		if err != nil {
			return nil, err
		}
		value, err := reader.value(depth + 1)
		if err != nil {
			return nil, err
		}
		if name, isText := key.(string); isText {
			fields[name] = value
		}
	}
	return fields, nil
}

func integer(number uint64) any {
	if number > math.MaxInt64 {
		return number
	}
	return int64(number)
}

func float(bits uint64, single bool) any {
	if single {
		return float64(math.Float32frombits(uint32(bits)))
	}
	return math.Float64frombits(bits)
}
