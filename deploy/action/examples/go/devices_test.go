package rdma

import "testing"

func TestDevicesOpen(t *testing.T) {
	names, err := Devices()
	if err != nil {
		t.Fatal(err)
	}
	if len(names) == 0 {
		t.Fatal("no RDMA device")
	}
}
