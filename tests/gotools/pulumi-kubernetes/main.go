// The Kubernetes provider of Pulumi. Its module lacks the generated files that its own main embeds (the schema and the
// mapping from Terraform). A Python program needs neither: it carries the schema in its SDK.
package main

import "github.com/pulumi/pulumi-kubernetes/provider/v4/pkg/provider"

var version = "0.0.0"

func main() {
	provider.Serve("kubernetes", version, []byte("{}"), []byte("{}"))
}
