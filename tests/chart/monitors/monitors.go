// Package monitors holds the versions of the Prometheus operator's types and of what makes definitions of them.
package monitors

import _ "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
