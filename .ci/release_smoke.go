// What somebody does first with the Go module; .ci/release-check builds and runs it in an empty module: ADDRESS of a registry.
package main

import (
	"context"
	"fmt"
	"os"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	kvgrpc "kvgrpc.dev/go"
	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

func main() {
	connection, err := kvgrpc.Dial(os.Args[1], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		panic(err)
	}
	found, err := kvgrpc.NewRegistry(connection).ListEngines(context.Background(), kvgrpcv1.Role_ROLE_UNSPECIFIED, false)
	if err != nil {
		panic(err)
	}
	fmt.Println(len(found.Engines), "engines")
}
