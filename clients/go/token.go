package kvgrpc

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/credentials"
)

const tokenVersion = "kvgrpc1"

// ShortestSecret is how many characters a secret must have at least: who gets a token can try secrets against it.
const ShortestSecret = 16

type proof struct {
	secret, target string
	insecure       bool
}

// Proof makes the bearer tokens of calls to one address ("host:port" or "unix:/path"), for grpc.WithPerRPCCredentials: the
// secret is never sent, and who gets a token can use it nowhere else. It wants TLS, which insecure waives: for loopback, Unix
// sockets and networks that you trust.
func Proof(secret, address string, insecure bool) (credentials.PerRPCCredentials, error) {
	if len(secret) < ShortestSecret {
		return nil, fmt.Errorf("the secret has %d characters, at least %d are needed", len(secret), ShortestSecret)
	}
	target, err := Target(address)
	if err != nil {
		return nil, err
	}
	return proof{secret, target, insecure}, nil
}

// Authorization is the header for calls to target, as Target spells it, that begin now.
func Authorization(secret, target string, now time.Time) string {
	id := hex.EncodeToString(mac([]byte(secret), tokenVersion+" key id"))[:16]
	key := mac([]byte(secret), tokenVersion+" audience "+target)
	encode := base64.RawURLEncoding.EncodeToString
	signed := strings.Join([]string{tokenVersion, id, strconv.FormatInt(now.Unix(), 10), encode([]byte(target))}, ".")
	return "Bearer " + signed + "." + encode(mac(key, signed))
}

// Target is what a token names that is sent to address: "host:port", "unix:/path" or "unix-abstract:name" in its one spelling.
func Target(address string) (string, error) {
	if path, found := strings.CutPrefix(address, "unix:"); found {
		return "unix:" + strings.TrimPrefix(path, "//"), nil
	}
	if strings.HasPrefix(address, "unix-abstract:") {
		return address, nil
	}
	colon := strings.LastIndexByte(address, ':')
	if colon < 1 {
		return "", errors.New("address: host:port, unix:/path or unix-abstract:name is needed, not " + strconv.Quote(address))
	}
	port, err := strconv.ParseUint(address[colon+1:], 10, 16)
	if err != nil {
		return "", errors.New("address: a port from 1 to 65535 is needed, not " + strconv.Quote(address))
	}
	host := strings.TrimSuffix(strings.TrimPrefix(address[:colon], "["), "]")
	if ip, err := netip.ParseAddr(host); err == nil {
		if host = ip.Unmap().String(); ip.Unmap().Is6() {
			host = "[" + host + "]"
		}
	} else {
		host = strings.TrimSuffix(strings.ToLower(host), ".")
	}
	return fmt.Sprintf("%s:%d", host, port), nil
}

func (made proof) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": Authorization(made.secret, made.target, time.Now())}, nil
}

func (made proof) RequireTransportSecurity() bool { return !made.insecure }

func mac(key []byte, text string) []byte {
	hash := hmac.New(sha256.New, key)
	hash.Write([]byte(text))
	return hash.Sum(nil)
}
