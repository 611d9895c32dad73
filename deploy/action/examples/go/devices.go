// Package rdma lists RDMA devices by libibverbs.
package rdma

/*
#cgo LDFLAGS: -libverbs
#include <infiniband/verbs.h>

static struct ibv_device *device_at(struct ibv_device **list, int index)
{
	return list[index];
}
*/
import "C"

import "fmt"

// Devices returns the names of all RDMA devices that can be opened.
func Devices() ([]string, error) {
	var count C.int
	list, err := C.ibv_get_device_list(&count)
	if list == nil {
		return nil, fmt.Errorf("ibv_get_device_list: %w", err)
	}
	defer C.ibv_free_device_list(list)
	var names []string
	for index := C.int(0); index < count; index++ {
		device := C.device_at(list, index)
		name := C.GoString(C.ibv_get_device_name(device))
		context, err := C.ibv_open_device(device)
		if context == nil {
			return nil, fmt.Errorf("ibv_open_device(%s): %w", name, err)
		}
		C.ibv_close_device(context)
		names = append(names, name)
	}
	return names, nil
}
