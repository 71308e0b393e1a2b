package kvgrpc

import (
	"encoding/binary"
	"errors"
	"math"
	"unicode/utf8"
)

const (
	// Batches are four deep; what nests deeper is hostile. No less than publishers read.
	deepest = 500
	// What is allocated on the word of a header alone.
	most = 256
	// The extension of that number is a time, of the years 1 to 9999.
	timestamp = 0xff
	earliest  = -62_135_596_800
	latest    = 253_402_300_799
)

var errMsgpack = errors.New("no msgpack")

// strange is a value that is passed over: an extension, or a map with keys that are no text.
type strange struct{}

// reader reads msgpack as nil, bool, int64, uint64 (above the largest int64), float64, string, []byte, []any,
// map[string]any and strange. What a header promises is never allocated before its bytes are there.
type reader struct {
	rest []byte
	// How many keys of maps, one within the other, this is in.
	keys int
}

// decodeMsgpack reads exactly one value.
func decodeMsgpack(payload []byte) (any, error) {
	reader := reader{rest: payload}
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
	case 0xc7, 0xc8, 0xc9:
		return reader.sized(1<<(code-0xc7), reader.extension)
	case 0xd4, 0xd5, 0xd6, 0xd7, 0xd8:
		return reader.extension(1 << (code - 0xd4))
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

// listHeader reads how many values a list has.
func (reader *reader) listHeader() (uint64, error) {
	header, err := reader.take(1)
	if err != nil {
		return 0, err
	}
	width := uint64(0)
	switch code := header[0]; {
	case code >= 0x90 && code <= 0x9f:
		return uint64(code & 0x0f), nil
	case code == 0xdc:
		width = 2
	case code == 0xdd:
		width = 4
	default:
		return 0, errMsgpack
	}
	taken, err := reader.take(width)
	return bigEndian(taken), err
}

// skip passes over one value, however deep, and returns its bytes. What it holds need not make sense.
func (reader *reader) skip() ([]byte, error) {
	begin := reader.rest
	for left := uint64(1); left > 0; left-- {
		header, err := reader.take(1)
		if err != nil {
			return nil, err
		}
		size, values, err := reader.extent(header[0])
		if err == nil {
			_, err = reader.take(size)
		}
		// Each value has at least one byte.
		if left += values; err != nil || left-1 > uint64(len(reader.rest)) {
			return nil, errMsgpack
		}
	}
	return begin[:len(begin)-len(reader.rest)], nil
}

// extent is how many bytes and values follow the header of a value.
func (reader *reader) extent(code byte) (size, values uint64, err error) {
	switch {
	case code <= 0x7f || code >= 0xe0:
		return 0, 0, nil
	case code <= 0x8f:
		return 0, 2 * uint64(code&0x0f), nil
	case code <= 0x9f:
		return 0, uint64(code & 0x0f), nil
	case code <= 0xbf:
		return uint64(code & 0x1f), 0, nil
	}
	width := uint64(0)
	switch code {
	case 0xc0, 0xc2, 0xc3:
		return 0, 0, nil
	case 0xca, 0xcb:
		return 4 << (code - 0xca), 0, nil
	case 0xcc, 0xcd, 0xce, 0xcf:
		return 1 << (code - 0xcc), 0, nil
	case 0xd0, 0xd1, 0xd2, 0xd3:
		return 1 << (code - 0xd0), 0, nil
	case 0xd4, 0xd5, 0xd6, 0xd7, 0xd8:
		return 1 + 1<<(code-0xd4), 0, nil
	case 0xc4, 0xc5, 0xc6:
		width = 1 << (code - 0xc4)
	case 0xc7, 0xc8, 0xc9:
		width = 1 << (code - 0xc7)
	case 0xd9, 0xda, 0xdb:
		width = 1 << (code - 0xd9)
	case 0xdc, 0xdd:
		width = 2 << (code - 0xdc)
	case 0xde, 0xdf:
		width = 2 << (code - 0xde)
	default:
		return 0, 0, errMsgpack
	}
	taken, err := reader.take(width)
	number := bigEndian(taken)
	switch code {
	case 0xc7, 0xc8, 0xc9:
		return number + 1, 0, err
	case 0xdc, 0xdd:
		return 0, number, err
	case 0xde, 0xdf:
		return 0, 2 * number, err
	}
	return number, 0, err
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
	return then(bigEndian(taken))
}

func bigEndian(taken []byte) uint64 {
	var number [8]byte
	copy(number[8-len(taken):], taken)
	return binary.BigEndian.Uint64(number[:])
}

func (reader *reader) bytes(size uint64) (any, error) {
	taken, err := reader.take(size)
	return append([]byte{}, taken...), err
}

func (reader *reader) text(size uint64) (any, error) {
	taken, err := reader.take(size)
	if err == nil && !utf8.Valid(taken) {
		err = errMsgpack
	}
	return string(taken), err
}

func (reader *reader) extension(size uint64) (any, error) {
	taken, err := reader.take(size + 1)
	if err != nil {
		return nil, err
	}
	if taken[0] == timestamp {
		err = checkTime(taken[1:])
	} else if reader.keys > 0 {
		err = errMsgpack
	}
	return strange{}, err
}

// checkTime refuses what publishers do, whose library makes a date of it.
func checkTime(written []byte) error {
	nanoseconds, seconds := uint64(0), int64(0)
	switch len(written) {
	case 4:
	case 8:
		nanoseconds = bigEndian(written) >> 34
	case 12:
		nanoseconds, seconds = bigEndian(written[:4]), int64(bigEndian(written[4:]))
	default:
		return errMsgpack
	}
	if nanoseconds > 999_999_999 || seconds < earliest || seconds > latest {
		return errMsgpack
	}
	return nil
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
	// A map is no key, nor in one: publishers cannot read it.
	if count > uint64(len(reader.rest)) || reader.keys > 0 {
		return nil, errMsgpack
	}
	fields, isStrange := make(map[string]any, min(count, most)), false
	for range count {
		reader.keys++
		key, err := reader.value(depth + 1)
		reader.keys--
		if err != nil {
			return nil, err
		}
		value, err := reader.value(depth + 1)
		if err != nil {
			return nil, err
		}
		if name, isText := key.(string); isText {
			fields[name] = value
		} else {
			isStrange = true
		}
	}
	if isStrange {
		return strange{}, nil
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
