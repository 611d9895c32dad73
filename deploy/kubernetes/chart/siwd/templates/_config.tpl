{{/* Configuration of siwd on a node; the address is put in by the init container. */}}
{{- define "siwd.config" -}}
[workers]
cores = {{ .Values.cores | toJson }}

[control]
socket = "/run/siwd/siwd.sock"
# Pods run with users of their own.
mode = "0666"

[dpdk]
{{- if eq .Values.link "pci" }}
hugepages = "require"
{{- else }}
hugepages = "auto"
{{- end }}
{{- if eq .Values.link "loopback" }}

[[device]]
name = "siw0"
pair = "loopback"
addresses = ["10.77.0.1/24", "fd77::1/64"]
mtu = 33024

[[device]]
name = "siw1"
pair = "loopback"
addresses = ["10.77.0.2/24", "fd77::2/64"]
mtu = 33024
{{- else }}

[[device]]
name = "siw0"
{{- if eq .Values.link "af_xdp" }}
af_xdp = {{ .Values.interface | quote }}
{{- else }}
pci = {{ .Values.pci | quote }}
{{- end }}
addresses = ADDRESSES
{{- end }}
{{- end }}
