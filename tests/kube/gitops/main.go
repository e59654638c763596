// Program gitops says what GitOps tools take an object for: kubectl and Flux by the library kstatus, Argo CD by a script
// in Lua. It reads objects as JSON from its input, one after the other, and prints a line of JSON for each.
//
//	gitops            by kstatus
//	gitops SCRIPT     by a health check for Argo CD
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
)

type verdict struct {
	Status  string `json:"status"`
	Message string `json:"message"`
}

func main() {
	judge := byKstatus
	if len(os.Args) == 2 {
		script, err := os.ReadFile(os.Args[1])
		if err != nil {
			fail(err)
		}
		judge = func(object []byte) (verdict, error) { return byScript(string(script), object) }
	}
	for objects := json.NewDecoder(os.Stdin); ; {
		var object json.RawMessage
		if err := objects.Decode(&object); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			fail(err)
		}
		found, err := judge(object)
		if err != nil {
			fail(err)
		}
		if err := json.NewEncoder(os.Stdout).Encode(found); err != nil {
			fail(err)
		}
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func byKstatus(object []byte) (verdict, error) {
	var read unstructured.Unstructured
	if err := read.UnmarshalJSON(object); err != nil { // numbers as clients have them: whole ones are int64
		return verdict{}, err
	}
	found, err := status.Compute(&read)
	if err != nil {
		return verdict{}, err
	}
	return verdict{found.Status.String(), found.Message}, nil
}

// byScript runs a script as Argo CD does: with base and table as its only libraries, and the object as obj.
func byScript(script string, object []byte) (verdict, error) {
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	for name, open := range map[string]lua.LGFunction{lua.BaseLibName: lua.OpenBase, lua.TabLibName: lua.OpenTable} {
		call := lua.P{Fn: state.NewFunction(open), Protect: true}
		if err := state.CallByParam(call, lua.LString(name)); err != nil {
			return verdict{}, err
		}
	}
	var read any
	if err := json.Unmarshal(object, &read); err != nil {
		return verdict{}, err
	}
	state.SetGlobal("obj", value(state, read))
	if err := state.DoString(script); err != nil {
		return verdict{}, err
	}
	said, is := state.Get(-1).(*lua.LTable)
	if !is {
		return verdict{}, errors.New("the script returns no table")
	}
	return verdict{lua.LVAsString(said.RawGetString("status")), lua.LVAsString(said.RawGetString("message"))}, nil
}

// value is a JSON value in Lua.
func value(state *lua.LState, from any) lua.LValue {
	switch from := from.(type) {
	case bool:
		return lua.LBool(from)
	case float64:
		return lua.LNumber(from)
	case string:
		return lua.LString(from)
	case []any:
		table := state.NewTable()
		for _, item := range from {
			table.Append(value(state, item))
		}
		return table
	case map[string]any:
		table := state.NewTable()
		for key, item := range from {
			table.RawSetString(key, value(state, item))
		}
		return table
	}
	return lua.LNil
}
