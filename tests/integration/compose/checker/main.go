// Reads a Compose file as Docker's `compose` does: validates it by the specification's JSON schema, fills in variables,
// checks that all names exist, and prints the resolved project as JSON.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"github.com/compose-spec/compose-go/v2/cli"
)

func main() {
	project, err := load(os.Args[1:])
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(project)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func load(files []string) (any, error) {
	options, err := cli.NewProjectOptions(files, cli.WithOsEnv, cli.WithProfiles([]string{"*"}))
	if err != nil {
		return nil, err
	}
	return options.LoadProject(context.Background())
}
