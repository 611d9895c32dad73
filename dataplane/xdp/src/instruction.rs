//! BPF instructions (Documentation/bpf/standardization/instruction-set.rst of Linux) and an
//! assembler with labels, as far as `program.rs` needs them.

use crate::{Error, Result};

/// A register of the machine. R1 to R5 are arguments of a call and clobbered by it (no call here has a
/// fifth), R6 to R9 survive it, R0 is its result, and R10 the read-only frame pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Register {
    R0,
    R1,
    R2,
    R3,
    R4,
    R6 = 6,
    R7,
    R8,
    R9,
    R10,
}

/// Width of a load or store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    Byte,
    Half,
    Word,
    Double,
}

/// 64-bit arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arithmetic {
    Add,
    And,
    ShiftLeft,
    Move,
}

/// Condition of a jump; comparisons are unsigned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Condition {
    Equal,
    NotEqual,
    Greater,
    /// A bit of the second operand is set in the first.
    AnyBit,
}

/// A target of jumps in the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Label(usize);

/// Functions of the kernel, by their number in linux/bpf.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Helper {
    MapLookup = 1,
    MapUpdate = 2,
    MapDelete = 3,
    RedirectMap = 51,
}

const CLASS_LOAD_IMMEDIATE: u8 = 0x00;
const CLASS_LOAD: u8 = 0x01;
const CLASS_STORE_IMMEDIATE: u8 = 0x02;
const CLASS_STORE: u8 = 0x03;
const CLASS_ALU: u8 = 0x04;
const CLASS_JUMP: u8 = 0x05;
const CLASS_ALU64: u8 = 0x07;
const MODE_MEMORY: u8 = 0x60;
const WIDTH_DOUBLE: u8 = 0x18;
/// The second operand is a register, not the immediate.
const SOURCE_REGISTER: u8 = 0x08;
const ALU_SWAP: u8 = 0xd0;
/// `ALU_SWAP` between the machine's byte order and big endian.
const SWAP_TO_BIG_ENDIAN: u8 = 0x08;
const JUMP_ALWAYS: u8 = 0x00;
const JUMP_CALL: u8 = 0x80;
const JUMP_EXIT: u8 = 0x90;
/// The immediate of a 64-bit load is the descriptor of a map.
const PSEUDO_MAP_DESCRIPTOR: u8 = 1;

impl Width {
    fn width_bits(self) -> u8 {
        match self {
            Width::Word => 0x00,
            Width::Half => 0x08,
            Width::Byte => 0x10,
            Width::Double => WIDTH_DOUBLE,
        }
    }
}

impl Arithmetic {
    fn operation_bits(self) -> u8 {
        match self {
            Arithmetic::Add => 0x00,
            Arithmetic::And => 0x50,
            Arithmetic::ShiftLeft => 0x60,
            Arithmetic::Move => 0xb0,
        }
    }
}

impl Condition {
    fn condition_bits(self) -> u8 {
        match self {
            Condition::Equal => 0x10,
            Condition::Greater => 0x20,
            Condition::AnyBit => 0x40,
            Condition::NotEqual => 0x50,
        }
    }
}

/// One instruction as the kernel reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

/// Collects instructions; jumps go to labels, which may be bound later.
#[derive(Debug, Default)]
pub(crate) struct Assembler {
    instructions: Vec<Instruction>,
    /// Index of the instruction behind each label.
    labels: Vec<Option<usize>>,
    /// Jumps and their targets.
    jumps: Vec<(usize, Label)>,
}

impl Assembler {
    /// Creates a label that is bound later.
    pub(crate) fn new_label(&mut self) -> Label {
        self.labels.push(None);
        Label(self.labels.len() - 1)
    }

    /// Places the label before the next instruction.
    pub(crate) fn bind_label(&mut self, label: Label) {
        self.labels[label.0] = Some(self.instructions.len());
    }

    fn emit_instruction(
        &mut self,
        code: u8,
        to: Register,
        from: Register,
        offset: i16,
        immediate: i32,
    ) {
        self.instructions.push(Instruction {
            code,
            registers: (from as u8) << 4 | to as u8,
            offset,
            immediate,
        });
    }

    /// `to = *(from + offset)`
    pub(crate) fn load_field(&mut self, width: Width, to: Register, from: Register, offset: i16) {
        let code = CLASS_LOAD | MODE_MEMORY | width.width_bits();
        self.emit_instruction(code, to, from, offset, 0);
    }

    /// Loads a two-byte field of the wire, in the machine's byte order.
    pub(crate) fn load_big_endian_half(&mut self, to: Register, from: Register, offset: i16) {
        self.load_field(Width::Half, to, from, offset);
        let code = CLASS_ALU | ALU_SWAP | SWAP_TO_BIG_ENDIAN;
        self.emit_instruction(code, to, Register::R0, 0, 16);
    }

    /// `*(to + offset) = from`
    pub(crate) fn store_register(
        &mut self,
        width: Width,
        to: Register,
        offset: i16,
        from: Register,
    ) {
        let code = CLASS_STORE | MODE_MEMORY | width.width_bits();
        self.emit_instruction(code, to, from, offset, 0);
    }

    /// `*(to + offset) = value`
    pub(crate) fn store_immediate(&mut self, width: Width, to: Register, offset: i16, value: i32) {
        let code = CLASS_STORE_IMMEDIATE | MODE_MEMORY | width.width_bits();
        self.emit_instruction(code, to, Register::R0, offset, value);
    }

    /// `to = to OPERATION value`
    pub(crate) fn compute_immediate(&mut self, operation: Arithmetic, to: Register, value: i32) {
        let code = CLASS_ALU64 | operation.operation_bits();
        self.emit_instruction(code, to, Register::R0, 0, value);
    }

    /// `to = to OPERATION from`
    pub(crate) fn compute_register(&mut self, operation: Arithmetic, to: Register, from: Register) {
        let code = CLASS_ALU64 | SOURCE_REGISTER | operation.operation_bits();
        self.emit_instruction(code, to, from, 0, 0);
    }

    /// Loads the map with this descriptor into `to`.
    pub(crate) fn load_map(&mut self, to: Register, descriptor: i32) {
        self.instructions.push(Instruction {
            code: CLASS_LOAD_IMMEDIATE | WIDTH_DOUBLE,
            registers: PSEUDO_MAP_DESCRIPTOR << 4 | to as u8,
            offset: 0,
            immediate: descriptor,
        });
        // The upper half of the 64 bits is an instruction of its own.
        self.emit_instruction(0, Register::R0, Register::R0, 0, 0);
    }

    /// Calls a function of the kernel.
    pub(crate) fn call_helper(&mut self, helper: Helper) {
        let code = CLASS_JUMP | JUMP_CALL;
        self.emit_instruction(code, Register::R0, Register::R0, 0, helper as i32);
    }

    /// Ends the program with the result in R0.
    pub(crate) fn exit_program(&mut self) {
        self.emit_instruction(CLASS_JUMP | JUMP_EXIT, Register::R0, Register::R0, 0, 0);
    }

    /// Jumps unconditionally.
    pub(crate) fn jump_always(&mut self, label: Label) {
        self.jumps.push((self.instructions.len(), label));
        self.emit_instruction(CLASS_JUMP | JUMP_ALWAYS, Register::R0, Register::R0, 0, 0);
    }

    /// Jumps if `register CONDITION value`.
    pub(crate) fn jump_if(
        &mut self,
        condition: Condition,
        register: Register,
        value: i32,
        label: Label,
    ) {
        self.jumps.push((self.instructions.len(), label));
        let code = CLASS_JUMP | condition.condition_bits();
        self.emit_instruction(code, register, Register::R0, 0, value);
    }

    /// Jumps if `left CONDITION right`.
    pub(crate) fn jump_if_registers(
        &mut self,
        condition: Condition,
        left: Register,
        right: Register,
        label: Label,
    ) {
        self.jumps.push((self.instructions.len(), label));
        let code = CLASS_JUMP | SOURCE_REGISTER | condition.condition_bits();
        self.emit_instruction(code, left, right, 0, 0);
    }

    /// Resolves the jumps and returns the program.
    ///
    /// # Errors
    /// A label was never bound, or is too far away.
    pub(crate) fn resolve_jumps(mut self) -> Result<Vec<Instruction>> {
        for (at, label) in &self.jumps {
            let target = self.labels[label.0].ok_or(Error::Assembly("a label has no place"))?;
            // Counted from the instruction behind the jump.
            let distance = target as i64 - *at as i64 - 1;
            self.instructions[*at].offset =
                i16::try_from(distance).map_err(|_| Error::Assembly("a jump is too far"))?;
        }
        Ok(self.instructions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_have_the_bytes_of_the_instruction_set() {
        let mut code = Assembler::default();
        let end = code.new_label();
        code.load_field(Width::Word, Register::R7, Register::R6, 4);
        code.compute_immediate(Arithmetic::Move, Register::R0, 2);
        code.compute_register(Arithmetic::Add, Register::R1, Register::R2);
        code.jump_if(Condition::NotEqual, Register::R1, 8, end);
        code.store_immediate(Width::Double, Register::R10, -8, -1);
        code.bind_label(end);
        code.exit_program();
        let of = |code, registers, offset, immediate| Instruction {
            code,
            registers,
            offset,
            immediate,
        };
        assert_eq!(
            code.resolve_jumps().unwrap(),
            [
                of(0x61, 0x67, 4, 0),
                of(0xb7, 0x00, 0, 2),
                of(0x0f, 0x21, 0, 0),
                of(0x55, 0x01, 1, 8),
                of(0x7a, 0x0a, -8, -1),
                of(0x95, 0x00, 0, 0),
            ]
        );
    }

    #[test]
    fn a_label_without_a_place_is_an_error() {
        let mut code = Assembler::default();
        let nowhere = code.new_label();
        code.jump_always(nowhere);
        assert!(matches!(code.resolve_jumps(), Err(Error::Assembly(_))));
    }
}
